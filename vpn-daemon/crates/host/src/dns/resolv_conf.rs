//! resolv.conf: reading leniently, writing ours.
