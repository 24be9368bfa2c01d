//! The data loop under load: two of them, joined by a relay or by UDP over loopback, with devices that make and take
//! packets as fast as they are asked. No packet allocates, and no batch falls apart on its way.
//!
//! Allocations are counted for each thread; the devices read the count of the loop that calls them.

#![allow(clippy::unwrap_used, reason = "helpers of tests count as tests")]

mod pair;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use pair::{Pair, Way};

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
#[ignore = "the engine has no direct paths yet"]
async fn no_packet_allocates_by_udp() {
    no_packet_allocates(Way::Direct).await;
}
