#!/bin/sh
# Unpacks Debian's systemd-resolved into a folder, for tests/real_resolved.rs. Nothing is installed:
# the packages' scripts would replace this machine's /etc/resolv.conf.
#
#     fetch-resolved.sh target/rootfs
set -eu
[ $# -eq 1 ] || { echo "usage: $0 FOLDER" >&2; exit 64; }
mkdir -p "$1"
cd "$1"
apt-get download systemd-resolved libsystemd-shared
for package in *.deb; do
    dpkg-deb -x "$package" .
    rm "$package"
done
test -x lib/systemd/systemd-resolved
