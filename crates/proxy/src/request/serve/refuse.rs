//! Requests that are refused before they have a story: what came is no head, more of one than allowed, or does not come
//! to its end in time. They are counted, logged and told of whichever version the client speaks.

use std::{
    rc::Rc,
    time::{Duration, Instant, SystemTime},
};

use crate::{
    call::export,
    overload::limit_log::{self, Limit},
    request::hop,
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

/// How long a head may take from its first byte, and what is said of one that takes longer.
pub(super) fn head_timeout(manager: &HttpManager) -> Option<(Duration, Malformed)> {
    let limits = [
        (manager.request_headers_timeout, HEADER_TIMEOUT),
        (manager.stream_idle_timeout, IDLE_TIMEOUT),
        (manager.request_timeout, REQUEST_TIMEOUT),
    ];
    let limits = limits.into_iter().filter_map(|(limit, why)| Some((limit?, Malformed::new(408, why))));
    limits.min_by_key(|(limit, _)| *limit)
}

/// The answer to such a request.
pub(super) fn answer(worker: &Worker, manager: &HttpManager, why: Malformed) -> ResponseHead {
    let mut response = ResponseHead::build(why.status, &[]);
    hop::finish_response(worker, manager, &mut response, Instant::now());
    response
}

/// What the answer says in HTTP/1.1. As Envoy's: what can be read, but goes nowhere, is refused without words.
pub(super) fn content(why: Malformed) -> &'static str {
    match why.reason {
        HEADER_TIMEOUT => "request header timeout",
        IDLE_TIMEOUT => "stream timeout",
        REQUEST_TIMEOUT => "request timeout",
        "low_version" => write::reason(why.status),
        known if known.starts_with("http1.") => write::reason(why.status),
        _ => "",
    }
}

/// Counts the refusal, and tells the logs. `response` is what has been answered, with so many bytes of content; `None`: the
/// connection ends without an answer.
pub(super) fn note(
    worker: &Rc<Worker>,
    origin: &Origin,
    manager: &HttpManager,
    why: Malformed,
    version: Version,
    response: Option<(&ResponseHead, u64)>,
) {
    count(worker, origin, manager, why);
    let mut record = Record::new(origin.listener.direction, SystemTime::now());
    record.flags = match why.reason {
        HEADER_TIMEOUT | REQUEST_TIMEOUT | "missing_host_header" => Flags::NONE,
        IDLE_TIMEOUT => Flags::SI,
        _ => Flags::DPE,
    };
    if let Some((response, sent)) = response {
        (record.status, record.bytes_sent) = (response.status(), sent);
    }
    record.details = why.reason;
    record.downstream = Some(&origin.peer);
    record.downstream_local = Some(origin.destination);
    record.downstream_remote = Some(origin.source);
    record.downstream_direct = Some(origin.direct);
    // Of a head that cannot be read only the version is told.
    let mut request = RequestHead::default();
    request.version = version;
    let response = response.map(|(response, _)| response);
    let context = Context { record: &record, request: Some(&request), response };
    export::log(worker, &manager.access_logs, &context);
}

fn count(worker: &Worker, origin: &Origin, manager: &HttpManager, why: Malformed) {
    let counters = worker.shard.manager(&manager.stat_prefix);
    if why.reason.starts_with("http1.") {
        counters.cx_protocol_error.inc();
    }
    let (counter, limit) = match why.reason {
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
