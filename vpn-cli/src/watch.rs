//! `status --watch`: the status again and again, at every change, until the service or the user ends it.

use crate::connect::{News, Service};
use crate::problem::Problem;
use crate::report::Report;

/// Gives every report that differs from the one before; never returns `Ok` but by `show`'s will.
pub(crate) async fn follow(
    service: &mut Service,
    mut show: impl FnMut(&Report) -> Result<(), Problem>,
) -> Result<(), Problem> {
    let mut shown = Report::of(service.status());
    show(&shown)?;
    loop {
        if let News::Progress(_) = service.news().await? {
            continue;
        }
        let report = Report::of(service.status());
        if report != shown {
            show(&report)?;
            shown = report;
        }
    }
}
