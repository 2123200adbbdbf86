//! Tracing: the decision whether a request is traced, and reading and writing of the trace context.
//!
//! The decision is stored in the digit of `x-request-id` at offset 14, so that all proxies on the path decide alike.
//! The context is a W3C trace context (<https://www.w3.org/TR/trace-context/>), or B3 in one header or in several.

use std::time::SystemTime;

use crate::config::trace::{RequestIdUse, Sampling, Tracer, Zipkin};
use skysail_http::head::{Headers, RequestHead};

#[cfg(test)]
mod tests;

/// A span and its position in the trace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpanContext {
    /// Trace id.
    pub trace: u128,
    /// The trace id is written with all 128 bits.
    pub long: bool,
    /// Span id.
    pub span: u64,
    /// Id of the parent span.
    pub parent: Option<u64>,
    /// The parent span belongs to another process.
    pub remote: bool,
    /// The span is sampled: it is sent to the collector.
    pub sampled: bool,
    /// `tracestate`, forwarded as received.
    pub state: Box<str>,
}

impl SpanContext {
    /// Returns the trace id in hexadecimal digits.
    pub fn trace_id(&self) -> String {
        if self.long { format!("{:032x}", self.trace) } else { format!("{:016x}", self.trace) }
    }

    /// Returns the span id in hexadecimal digits.
    pub fn span_id(&self) -> String {
        format!("{:016x}", self.span)
    }
}

/// Side of a call that records the span.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallSide {
    /// The side that received the call.
    Server,
    /// The side that made the call.
    Client,
}

const REQUEST_ID: &str = "x-request-id";
/// Offset of the decision in a request id, and length of such an id.
const MARK: usize = 14;
const ID_LENGTH: usize = 36;

/// Values of the decision. Not traced: the version digit of a random UUID.
const NOT: u8 = b'4';
const RANDOM: u8 = b'9';
const FORCED: u8 = b'a';
const CLIENT: u8 = b'b';

/// Returns whether a request is traced. Writes a new decision into its request id.
pub fn decide(
    sampling: &Sampling,
    request_id: RequestIdUse,
    head: &mut RequestHead,
    rng: &mut fastrand::Rng,
) -> bool {
    if !request_id.decides {
        return true;
    }
    let Some(id) = head.header(REQUEST_ID) else { return false };
    let Some(number) = id.get(..8).and_then(hex).and_then(|number| u32::try_from(number).ok()) else {
        return false;
    };
    let marked = if id.len() == ID_LENGTH { id[MARK] } else { NOT };
    let chosen = match marked {
        RANDOM | FORCED | CLIENT => marked,
        _ if head.has("x-client-trace-id") && sampling.client.contains(rng.u32(..)) => CLIENT,
        _ if head.has("x-envoy-force-trace") => FORCED,
        _ if sampling.random.contains(number) => RANDOM,
        _ => return false,
    };
    let mark = if sampling.overall.contains(number) { chosen } else { NOT };
    if mark != marked && request_id.pack {
        set_mark(head, mark);
    }
    mark != NOT
}

fn set_mark(head: &mut RequestHead, mark: u8) {
    let id = head.header(REQUEST_ID).and_then(|id| <[u8; ID_LENGTH]>::try_from(id).ok());
    if let Some(mut id) = id {
        id[MARK] = mark;
        head.set(REQUEST_ID, &id);
    }
}

/// Header format of a trace context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ContextFormat {
    /// `traceparent` and `tracestate`.
    W3c,
    /// `b3`.
    Single,
    /// `x-b3-traceid` and others.
    Several,
}

/// The trace context of a request cannot be parsed.
#[derive(Debug, PartialEq, Eq)]
pub struct InvalidContext;

/// Returns the span of a request and the header format of its context. Without a context from the client, the trace
/// begins here.
///
/// # Errors
///
/// The client's context cannot be parsed: it is forwarded unchanged, and the request is not traced.
pub fn context(
    tracer: Tracer,
    end: CallSide,
    decision: bool,
    head: &RequestHead,
    rng: &mut fastrand::Rng,
) -> Result<(SpanContext, ContextFormat), InvalidContext> {
    let mut new_id = || rng.u64(1..);
    match tracer {
        Tracer::OpenTelemetry => {
            let Some(above) = w3c(head)? else {
                let trace = u128::from(new_id()) << 64 | u128::from(new_id());
                return Ok((first(trace, new_id(), true, decision), ContextFormat::W3c));
            };
            Ok((below(&above, new_id(), above.sampled && decision, true), ContextFormat::W3c))
        }
        Tracer::Zipkin(zipkin) => {
            let (above, sampled, form) = b3(zipkin, head)?;
            let sampled = sampled.unwrap_or(decision);
            let Some(above) = above else {
                let id = new_id();
                let high = match (zipkin.long_ids, zipkin.timed_ids) {
                    (false, _) => 0,
                    (true, false) => new_id(),
                    (true, true) => seconds() << 32 | new_id() >> 32,
                };
                let trace = u128::from(high) << 64 | u128::from(id);
                return Ok((first(trace, id, zipkin.long_ids, sampled), form));
            };
            // The server's span of a call shares the id of the client's span.
            if zipkin.shared && end == CallSide::Server {
                return Ok((SpanContext { sampled, ..above }, form));
            }
            Ok((below(&above, new_id(), sampled, true), form))
        }
    }
}

fn seconds() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs()
}

fn first(trace: u128, span: u64, long: bool, sampled: bool) -> SpanContext {
    SpanContext { trace, long, span, parent: None, remote: false, sampled, state: Box::default() }
}

/// Returns a child span.
pub fn below(above: &SpanContext, span: u64, sampled: bool, remote: bool) -> SpanContext {
    SpanContext { span, parent: Some(above.span), remote, sampled, ..above.clone() }
}

/// Returns the W3C trace context of a request; `None` if there is none.
fn w3c(head: &Headers) -> Result<Option<SpanContext>, InvalidContext> {
    let Some(parent) = head.header("traceparent") else { return Ok(None) };
    let [v1, v2, b'-', rest @ ..] = parent else { return Err(InvalidContext) };
    let (trace, rest) = rest.split_at_checked(32).ok_or(InvalidContext)?;
    let Some((span, flags)) = rest.strip_prefix(b"-").and_then(|rest| rest.split_at_checked(16)) else {
        return Err(InvalidContext);
    };
    let Some(flags @ [_, _]) = flags.strip_prefix(b"-") else { return Err(InvalidContext) };
    let readable = (hex(&[*v1, *v2]), hex(trace), hex(span), hex(flags));
    let (Some(_), Some(trace @ 1..), Some(span @ 1..), Some(flags)) = readable else {
        return Err(InvalidContext);
    };
    let mut state = Vec::new();
    for value in head.header_values("tracestate") {
        if !state.is_empty() {
            state.push(b',');
        }
        state.extend_from_slice(value);
    }
    let context = first(trace, low(span), true, flags & 1 == 1);
    Ok(Some(SpanContext { state: String::from_utf8_lossy(&state).into(), ..context }))
}

/// B3 context of a request: the parent span, the sampling decision and the header format.
type B3 = (Option<SpanContext>, Option<bool>, ContextFormat);

fn b3(zipkin: Zipkin, head: &Headers) -> Result<B3, InvalidContext> {
    if let Some(value) = head.header("b3") {
        let (above, sampled) = single(value)?;
        return Ok((above, sampled, ContextFormat::Single));
    }
    let sampled = head.header("x-b3-sampled").map(|value| matches!(value, b"1" | b"true"));
    if let Some(above) = several(head)? {
        return Ok((Some(above), sampled, ContextFormat::Several));
    }
    // An invalid trace context is ignored.
    let above = if zipkin.w3c { w3c(head).unwrap_or_default() } else { None };
    let sampled = above.as_ref().map(|above| above.sampled).or(sampled);
    // `tracestate` stays in the request.
    let above =
        above.map(|above| SpanContext { long: above.trace >> 64 != 0, state: Box::default(), ..above });
    Ok((above, sampled, ContextFormat::Several))
}

/// Parses `TRACE-SPAN-SAMPLED-PARENT`. The last one or two parts are optional; `SAMPLED` may also be the only part.
fn single(value: &[u8]) -> Result<(Option<SpanContext>, Option<bool>), InvalidContext> {
    let flag = |flag: &[u8]| match flag {
        b"0" => Ok(Some(false)),
        b"1" | b"d" => Ok(Some(true)),
        _ => Err(InvalidContext),
    };
    if value.len() == 1 {
        return Ok((None, flag(value)?));
    }
    let mut parts = value.split(|b| *b == b'-');
    let (Some(trace), Some(span)) = (parts.next(), parts.next()) else { return Err(InvalidContext) };
    let sampled = parts.next().map_or(Ok(None), flag)?;
    let parent = parts.next();
    let sizes = (trace.len(), span.len(), parent.map_or(16, <[u8]>::len), parts.next());
    let (16 | 32, 16, 16, None) = sizes else { return Err(InvalidContext) };
    let (Some(id), Some(span)) = (hex(trace), hex(span)) else { return Err(InvalidContext) };
    let parent = parent.map(|parent| hex(parent).map(low).ok_or(InvalidContext)).transpose()?;
    let context = first(id, low(span), trace.len() == 32 && id >> 64 != 0, false);
    Ok((Some(SpanContext { parent: parent.filter(|id| *id != 0), remote: true, ..context }), sampled))
}

fn several(head: &Headers) -> Result<Option<SpanContext>, InvalidContext> {
    let (Some(trace), Some(span)) = (head.header("x-b3-traceid"), head.header("x-b3-spanid")) else {
        return Ok(None);
    };
    let id = |value: &[u8]| hex(value).filter(|_| value.len() <= 16).map(low).ok_or(InvalidContext);
    let trace = match trace.len() {
        32 => hex(trace).ok_or(InvalidContext)?,
        _ => id(trace)?.into(),
    };
    let parent = head.header("x-b3-parentspanid").filter(|value| !value.is_empty()).map(id).transpose()?;
    let context = first(trace, id(span)?, trace >> 64 != 0, false);
    Ok(Some(SpanContext { parent: parent.filter(|id| *id != 0), remote: true, ..context }))
}

/// Writes a trace context into a request.
pub fn inject(context: &SpanContext, form: ContextFormat, tracer: Tracer, head: &mut Headers) {
    let sampled = if context.sampled { "1" } else { "0" };
    match form {
        ContextFormat::W3c => {
            set_traceparent(context, head);
            head.set("tracestate", context.state.as_bytes());
        }
        ContextFormat::Single => {
            let (trace, span) = (context.trace_id(), context.span_id());
            let mut value = format!("{trace}-{span}-{sampled}");
            if let Some(parent) = context.parent {
                value.push_str(&format!("-{parent:016x}"));
            }
            head.set("b3", value.as_bytes());
        }
        ContextFormat::Several => {
            head.set("x-b3-traceid", context.trace_id().as_bytes());
            head.set("x-b3-spanid", context.span_id().as_bytes());
            if let Some(parent) = context.parent {
                head.set("x-b3-parentspanid", format!("{parent:016x}").as_bytes());
            }
            head.set("x-b3-sampled", sampled.as_bytes());
        }
    }
    if matches!(tracer, Tracer::Zipkin(Zipkin { w3c: true, .. })) {
        set_traceparent(context, head);
    }
}

fn set_traceparent(context: &SpanContext, head: &mut Headers) {
    let SpanContext { trace, span, sampled, .. } = context;
    head.set("traceparent", format!("00-{trace:032x}-{span:016x}-{:02x}", u8::from(*sampled)).as_bytes());
}

/// Parses 1 to 32 hexadecimal digits.
fn hex(text: &[u8]) -> Option<u128> {
    let is_one = (1..=32).contains(&text.len()) && text.iter().all(u8::is_ascii_hexdigit);
    u128::from_str_radix(std::str::from_utf8(text).ok()?, 16).ok().filter(|_| is_one)
}

fn low(number: u128) -> u64 {
    number as u64
}
