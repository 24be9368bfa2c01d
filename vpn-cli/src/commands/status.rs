//! `status`: the service sends it at the beginning of every conversation.

use crate::connect::Service;
use crate::report::Report;

pub(crate) fn run(service: &Service) -> Report {
    Report::of(service.status())
}
