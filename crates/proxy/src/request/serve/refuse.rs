//! Requests that are refused before routing: the head is malformed, above a limit, or late. They are counted and logged
//! for both versions of HTTP.

use std::{
    rc::Rc,
    time::{Duration, Instant, SystemTime},
};

use crate::{
    call::export,
    overload::limit_log::{self, Limit},
    request::{hop, mutation},
    worker::{Worker, downstream::Origin},
};
use skysail_http::{
    head::{RequestHead, ResponseHead, Version},
    http1::{Malformed, write},
};
use skysail_policy::{
    config::HttpManager,
    error::Flags,
    record::{Context, Record},
};

const HEADER_TIMEOUT: &str = "request_header_timeout";
const IDLE_TIMEOUT: &str = "stream_idle_timeout";
const REQUEST_TIMEOUT: &str = "request_overall_timeout";

/// Returns the time limit of a head from its first byte, and the refusal of a head that exceeds it.
pub(super) fn head_timeout(manager: &HttpManager) -> Option<(Duration, Malformed)> {
    let limits = [
        (manager.request_headers_timeout, HEADER_TIMEOUT),
        (manager.stream_idle_timeout, IDLE_TIMEOUT),
        (manager.request_timeout, REQUEST_TIMEOUT),
    ];
    let limits = limits.into_iter().filter_map(|(limit, reason)| Some((limit?, Malformed::new(408, reason))));
    limits.min_by_key(|(limit, _)| *limit)
}

/// Returns the head of the response to a refused request.
pub(super) fn response(worker: &Worker, manager: &HttpManager, refusal: Malformed) -> ResponseHead {
    let mut response = ResponseHead::build(refusal.status, &[]);
    if manager.mutates_responses {
        mutation::mutate_refusal(manager, &mut response);
    }
    hop::finish_response(worker, manager, &mut response, Instant::now());
    response
}

/// Returns the content of the response in HTTP/1.1. As in Envoy, it is empty for other reasons, such as a missing host.
pub(super) fn content(refusal: Malformed) -> &'static str {
    match refusal.reason {
        HEADER_TIMEOUT => "request header timeout",
        IDLE_TIMEOUT => "stream timeout",
        REQUEST_TIMEOUT => "request timeout",
        "low_version" => write::reason(refusal.status),
        known if known.starts_with("http1.") => write::reason(refusal.status),
        _ => "",
    }
}

/// Counts and logs a refusal. `response` is the response and the length of its content; `None` if the connection ends
/// without one.
pub(super) fn note(
    worker: &Rc<Worker>,
    origin: &Origin,
    manager: &HttpManager,
    refusal: Malformed,
    version: Version,
    response: Option<(&ResponseHead, u64)>,
) {
    count(worker, origin, manager, refusal);
    let mut record = Record::new(origin.listener.direction, SystemTime::now());
    record.flags = match refusal.reason {
        HEADER_TIMEOUT | REQUEST_TIMEOUT | "missing_host_header" => Flags::NONE,
        IDLE_TIMEOUT => Flags::SI,
        _ => Flags::DPE,
    };
    if let Some((response, sent)) = response {
        (record.status, record.bytes_sent) = (response.status(), sent);
    }
    record.details = refusal.reason;
    record.downstream = Some(&origin.peer);
    record.downstream_local = Some(origin.destination);
    record.downstream_remote = Some(origin.source);
    record.downstream_direct = Some(origin.direct);
    // The log contains only the version of a malformed head.
    let mut request = RequestHead::default();
    request.version = version;
    let response = response.map(|(response, _)| response);
    let context = Context { record: &record, request: Some(&request), response };
    export::log(worker, &manager.access_logs, &context);
}

fn count(worker: &Worker, origin: &Origin, manager: &HttpManager, refusal: Malformed) {
    let counters = worker.shard.manager(&manager.stat_prefix);
    if refusal.reason.starts_with("http1.") {
        counters.cx_protocol_error.inc();
    }
    let (counter, limit) = match refusal.reason {
        "http1.headers_too_large" => (&counters.http1_head_size, Limit::HeadSize),
        "http1.too_many_headers" => (&counters.http1_head_fields, Limit::HeadFields),
        "http2.header_list_size_too_large" => (&counters.http2_head_size, Limit::HeadSize),
        "http2.too_many_headers" => (&counters.http2_headers, Limit::HeadFields),
        HEADER_TIMEOUT => (&counters.rq_header_timeout, Limit::HeadTime),
        IDLE_TIMEOUT => (&counters.rq_idle_timeout, Limit::StreamIdle),
        REQUEST_TIMEOUT => (&counters.rq_timeout, Limit::RequestTime),
        _ => return,
    };
    counter.inc();
    limit_log::log(limit, format_args!("{}, client {}", manager.stat_prefix, origin.source));
}
