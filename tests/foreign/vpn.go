package main

import (
	"flag"
	"net"
	"net/netip"
	"sync/atomic"

	wgtun "github.com/tailscale/wireguard-go/tun"
)

// vpnRoom is space for one datagram behind the header that the TUN library
// wants in front of packets.
const (
	vpnHeadroom = 16
	vpnRoom     = 1 << 16
)

// runVPN is one end of a VPN that is not ours: what goes into its TUN device
// comes out of the other end's. Nothing is encrypted.
func runVPN(args []string) error {
	fs := flag.NewFlagSet("vpn", flag.ContinueOnError)
	name := fs.String("tun", "", "TUN device to create")
	mtu := fs.Int("mtu", 1400, "its MTU")
	listen := fs.String("listen", "", "UDP address")
	peerText := fs.String("peer", "", "UDP address of the other end (default: whoever spoke last)")
	if err := fs.Parse(args); err != nil {
		return err
	}
	var peer atomic.Pointer[netip.AddrPort]
	if *peerText != "" {
		p, err := netip.ParseAddrPort(*peerText)
		if err != nil {
			return err
		}
		peer.Store(&p)
	}
	ctx, cancel := runContext()
	defer cancel()
	local, err := netip.ParseAddrPort(*listen)
	if err != nil {
		return err
	}
	conn, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(local))
	if err != nil {
		return err
	}
	defer conn.Close()
	dev, err := wgtun.CreateTUN(*name, *mtu)
	if err != nil {
		return err
	}
	defer dev.Close()
	go func() {
		for range dev.Events() {
		}
	}()
	go func() {
		bufs, sizes := make([][]byte, dev.BatchSize()), make([]int, dev.BatchSize())
		for i := range bufs {
			bufs[i] = make([]byte, vpnHeadroom+vpnRoom)
		}
		for {
			n, err := dev.Read(bufs, sizes, vpnHeadroom)
			if err != nil {
				cancel()
				return
			}
			to := peer.Load()
			for i := 0; to != nil && i < n; i++ {
				conn.WriteToUDPAddrPort(bufs[i][vpnHeadroom:][:sizes[i]], *to)
			}
		}
	}()
	go func() {
		buf := make([]byte, vpnHeadroom+vpnRoom)
		for {
			n, from, err := conn.ReadFromUDPAddrPort(buf[vpnHeadroom:])
			if err != nil {
				cancel()
				return
			}
			if *peerText == "" {
				peer.Store(&from)
			}
			// A packet that the kernel does not want is nobody's loss.
			dev.Write([][]byte{buf[:vpnHeadroom+n]}, vpnHeadroom)
		}
	}()
	emit("ready", fields{"listen": conn.LocalAddr().String()})
	go readCommands(ctx, cancel, func(command) error { return nil })
	<-ctx.Done()
	return nil
}
