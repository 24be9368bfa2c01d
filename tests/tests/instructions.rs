//! The data path needs no more instructions a packet than it did.

use codervpn_testbed::{bench, skip};

#[test]
fn the_data_path_is_as_cheap_as_the_stored_baseline() {
    match bench::check_instructions() {
        Ok(Some(())) => {}
        Ok(None) => skip::skip("valgrind is not installed"),
        Err(error) => panic!("{error:#}"),
    }
}
