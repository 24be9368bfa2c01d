//! The data loop under load: two of them, joined by a relay or by UDP over loopback, with devices that make and take
//! packets as fast as they are asked. No packet allocates, and no batch falls apart on its way.
//!
//! Allocations are counted for each thread; the devices read the count of the loop that calls them.

#![allow(clippy::unwrap_used, reason = "helpers of tests count as tests")]

mod pair;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use pair::{PAYLOAD, Pair, SEGMENTS, Way};

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: every call is passed on unchanged to the system's allocator; counting touches only a thread-local integer
// without a destructor, so it neither allocates nor runs after the thread's end.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let _ = ALLOCATIONS.try_with(|count| count.set(count.get() + 1));
        // SAFETY: the caller's promises are ours.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promises are ours.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        let _ = ALLOCATIONS.try_with(|count| count.set(count.get() + 1));
        // SAFETY: the caller's promises are ours.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Packets of a measured run. Enough for several timers to fire in between.
const PACKETS: u64 = 20_000;

/// The data path's rule 2 (`design.md` 6), over the real loop, both directions at once.
async fn no_packet_allocates(way: Way) {
    let pair = Pair::connected(way).await;
    // Buffers of the pools, tables and queues grow to what is needed.
    pair.exchange(PACKETS).await;
    let before = pair.allocations();
    pair.exchange(PACKETS).await;
    let allocations: Vec<u64> = pair.allocations().iter().zip(before).map(|(after, before)| after - before).collect();
    // Timers and events of the control side are no packets.
    assert!(allocations.iter().all(|count| *count < PACKETS / 1000), "{allocations:?} for {PACKETS} packets each way");
    pair.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_packet_allocates_by_relay() {
    no_packet_allocates(Way::Relay).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_packet_allocates_by_udp() {
    no_packet_allocates(Way::Direct).await;
}

/// Fast path 9: what a gigabyte of payload costs in system calls. A batch that falls apart anywhere shows here.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gigabyte_costs_few_system_calls() {
    let pair = Pair::connected(Way::Direct).await;
    let before = pair.snapshots().await;
    let packets = 400 * SEGMENTS;
    pair.send([packets, 0]).await;
    let after = pair.snapshots().await;
    let gigabytes = (packets as usize * PAYLOAD) as f64 / 1e9;
    let [sender, receiver] = [0, 1].map(|side| (&before[side], &after[side]));
    let mut figures = Vec::new();
    let mut per_gigabyte = |what, (before, after): (u64, u64)| {
        let calls = (after - before) as f64 / gigabytes;
        figures.push(format!("{what} {calls:.0}"));
        calls
    };
    let reads = per_gigabyte("device reads", (sender.0.tunnel.device_reads, sender.1.tunnel.device_reads));
    let sends = per_gigabyte("sends", (sender.0.udp.sends, sender.1.udp.sends));
    let receives = per_gigabyte("receives", (receiver.0.udp.receives, receiver.1.udp.receives));
    let writes = per_gigabyte("device writes", (receiver.0.tunnel.device_writes, receiver.1.tunnel.device_writes));
    println!("system calls per GB: {}", figures.join(", "));
    for (what, calls) in [("reads", reads), ("sends", sends), ("receives", receives), ("writes", writes)] {
        assert!(calls <= 20_000.0, "{what}: {figures:?}");
    }
    // Nothing is lost on the way, and nothing had to wait.
    let udp = &receiver.1.udp;
    assert_eq!((udp.truncated, udp.receive_errors, sender.1.udp.dropped_busy), (0, 0, 0));
    pair.stop().await;
}
