//! Compiles the three schemas without a protoc on the machine.
//!
//! Messages that carry a secret get no derived `Debug`; `src/redact.rs` writes
//! one that leaves the secret out.

use std::error::Error;

const SCHEMAS: [&str; 3] = ["vpn.proto", "codervpn_ext.proto", "tailnet.proto"];

const WITH_SECRETS: [&str; 5] = [
    ".vpn.StartRequest",
    ".vpn.StartRequest.Header",
    ".codervpn_ext.CheckRequest",
    ".codervpn_ext.Header",
    ".coder.tailnet.v2.RefreshResumeTokenResponse",
];

fn main() -> Result<(), Box<dyn Error>> {
    for schema in SCHEMAS {
        println!("cargo::rerun-if-changed={schema}");
    }
    let descriptors = protox::compile(SCHEMAS, ["."])?;
    prost_build::Config::new()
        // Ordered maps: the same message always gives the same bytes.
        .btree_map(["."])
        .skip_debug(WITH_SECRETS)
        .compile_fds(descriptors)?;
    Ok(())
}
