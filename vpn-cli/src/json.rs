//! What scripts read: one JSON object on one line.

use codervpn_proto::version::Version;
use serde::Serialize;
use serde_json::json;

use crate::commands::ping::{Pinged, Summary};

/// The types that are written have nothing that JSON cannot say.
pub(crate) fn line(data: &impl Serialize) -> String {
    serde_json::to_string(data).expect("text keys only")
}

pub(crate) fn version() -> String {
    line(&json!({ "version": env!("CARGO_PKG_VERSION"), "protocol": Version::CURRENT.to_string() }))
}

/// One ping; `error` is null when it was answered.
pub(crate) fn pinged(pinged: &Pinged) -> String {
    let (answer, error) = match &pinged.result {
        Ok(answer) => (Some(answer), None),
        Err(problem) => (None, Some(problem.what.as_str())),
    };
    line(&json!({
        "seq": pinged.seq,
        "name": answer.map(|answer| answer.name.as_str()),
        "latency_ms": answer.and_then(|answer| answer.latency_ms),
        "path": answer.and_then(|answer| answer.path),
        "endpoint": answer.and_then(|answer| answer.endpoint.as_deref()),
        "relay": answer.and_then(|answer| answer.relay.as_deref()),
        "echo": answer.is_some_and(|answer| answer.echo),
        "bytes": answer.and_then(|answer| answer.bytes),
        "path_latency_ms": answer.and_then(|answer| answer.path_latency_ms),
        "error": error,
    }))
}

/// The last line of `ping --json`.
pub(crate) fn ping_summary(summary: &Summary) -> String {
    let times = summary.times();
    line(&json!({
        "summary": {
            "name": summary.name,
            "sent": summary.sent,
            "answered": summary.answered,
            "loss_percent": summary.loss_percent(),
            "min_ms": times.map(|[least, ..]| least),
            "avg_ms": times.map(|[_, average, _]| average),
            "max_ms": times.map(|[.., most]| most),
        }
    }))
}
