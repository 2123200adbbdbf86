use proptest::prelude::*;

use super::*;
use crate::config::trace::Fraction;

const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
const SPAN: &str = "b7ad6b7169203331";
const OF_128: Zipkin = Zipkin { long_ids: true, timed_ids: false, shared: true, w3c: false };
const B3: Zipkin = Zipkin { long_ids: false, ..OF_128 };

fn head(fields: &[(&str, &str)]) -> RequestHead {
    RequestHead::build("GET", "/", "a", fields)
}

fn rng() -> fastrand::Rng {
    fastrand::Rng::with_seed(1)
}

fn sampling(random: u32) -> Sampling {
    Sampling {
        client: Fraction::ALL,
        random: Fraction { numerator: random, denominator: 10_000 },
        overall: Fraction::ALL,
    }
}

/// Returns whether the request is traced, and its id afterwards.
fn decided(sampling: Sampling, fields: &[(&str, &str)]) -> (bool, String) {
    let mut head = head(fields);
    let decision = decide(&sampling, RequestIdUse::default(), &mut head, &mut rng());
    let id = head.header(REQUEST_ID).unwrap_or_default();
    (decision, String::from_utf8(id.to_vec()).unwrap())
}

fn id(mark: char) -> String {
    format!("01234567-89ab-{mark}cde-8012-0123456789ab")
}

#[test]
fn the_decision_is_stored_in_the_request_id() {
    let (all, none) = (sampling(10_000), sampling(0));
    assert_eq!(decided(all, &[(REQUEST_ID, &id('4'))]), (true, id('9')));
    assert_eq!(decided(none, &[(REQUEST_ID, &id('4'))]), (false, id('4')));
    let forced = ("x-envoy-force-trace", "1");
    assert_eq!(decided(none, &[(REQUEST_ID, &id('4')), forced]), (true, id('a')));
    let client = ("x-client-trace-id", "c");
    assert_eq!(decided(none, &[(REQUEST_ID, &id('4')), forced, client]), (true, id('b')));
    let no_clients = Sampling { client: Fraction { numerator: 0, denominator: 100 }, ..none };
    assert_eq!(decided(no_clients, &[(REQUEST_ID, &id('4')), client]), (false, id('4')));
    // An earlier decision holds, unless the overall sampling excludes the request.
    let nothing = Sampling { overall: Fraction { numerator: 0, denominator: 100 }, ..all };
    for mark in ['9', 'a', 'b'] {
        assert_eq!(decided(none, &[(REQUEST_ID, &id(mark))]), (true, id(mark)));
        assert_eq!(decided(nothing, &[(REQUEST_ID, &id(mark))]), (false, id('4')));
    }
    assert_eq!(decided(nothing, &[(REQUEST_ID, &id('1'))]), (false, id('4')));
    assert_eq!(decided(none, &[(REQUEST_ID, &id('1'))]), (false, id('1')));
    // Other ids are not changed, but their digits decide as far as they can be parsed.
    assert_eq!(decided(all, &[]), (false, String::new()));
    assert_eq!(decided(all, &[(REQUEST_ID, "short")]), (false, "short".to_owned()));
    assert_eq!(decided(all, &[(REQUEST_ID, "0123456789")]), (true, "0123456789".to_owned()));
    let other = id('4').replace("01234567", "0123456z");
    assert_eq!(decided(all, &[(REQUEST_ID, &other)]), (false, other));
    // 0x01234567 is 19,088,743.
    assert!(!decided(sampling(8743), &[(REQUEST_ID, &id('4'))]).0);
    assert!(decided(sampling(8744), &[(REQUEST_ID, &id('4'))]).0);
}

#[test]
fn request_ids_are_unchanged_if_configured() {
    let of = |request_id, random| {
        let mut head = head(&[(REQUEST_ID, &id('4'))]);
        let decision = decide(&sampling(random), request_id, &mut head, &mut rng());
        assert_eq!(head.header(REQUEST_ID), Some(id('4').as_bytes()));
        decision
    };
    assert!(of(RequestIdUse { pack: false, decides: true }, 10_000));
    assert!(!of(RequestIdUse { pack: false, decides: true }, 0));
    // As in Envoy, every request is then traced.
    assert!(of(RequestIdUse { pack: true, decides: false }, 0));
}

fn of(
    tracer: Tracer,
    end: CallSide,
    fields: &[(&str, &str)],
) -> Result<(SpanContext, ContextFormat), InvalidContext> {
    context(tracer, end, true, &head(fields), &mut rng())
}

#[test]
fn w3c_trace_context_is_parsed() {
    let read = |fields: &[(&str, &str)]| of(Tracer::OpenTelemetry, CallSide::Server, fields).map(|(c, _)| c);
    let parent = format!("00-{TRACE}-{SPAN}-01");
    let context = read(&[("traceparent", &parent), ("tracestate", "a=1"), ("tracestate", "b=2")]).unwrap();
    assert_eq!((context.trace_id().as_str(), context.parent), (TRACE, hex(SPAN.as_bytes()).map(low)));
    assert_ne!(context.span_id(), SPAN);
    assert!(context.sampled && context.remote && &*context.state == "a=1,b=2");
    assert!(!read(&[("traceparent", &format!("00-{TRACE}-{SPAN}-00"))]).unwrap().sampled);
    assert!(read(&[("traceparent", &format!("cc-{}-{SPAN}-03", TRACE.to_uppercase()))]).unwrap().sampled);
    // `tracestate` without `traceparent` is ignored.
    let first = read(&[("tracestate", "a=1")]).unwrap();
    assert!(first.parent.is_none() && first.state.is_empty() && first.sampled);

    let zeros = TRACE.replace(|_| true, "0");
    for wrong in [
        "".to_owned(),
        "00".to_owned(),
        format!("00-{TRACE}-{SPAN}"),
        format!("00-{TRACE}-{SPAN}-1"),
        format!("00-{TRACE}-{SPAN}-01-"),
        format!("00-{zeros}-{SPAN}-01"),
        format!("00-{TRACE}-{}-01", &zeros[..16]),
        format!("00-{TRACE}-{}g-01", &SPAN[1..]),
        format!("00-+{}-{SPAN}-01", &TRACE[1..]),
        format!("00_{TRACE}-{SPAN}-01"),
    ] {
        assert_eq!(read(&[("traceparent", &wrong)]), Err(InvalidContext), "{wrong}");
    }
}

#[test]
fn a_request_is_sampled_only_if_both_sides_sample_it() {
    let parent = format!("00-{TRACE}-{SPAN}-01");
    let head = head(&[("traceparent", &parent)]);
    let is_sampled = |decision| {
        let context = context(Tracer::OpenTelemetry, CallSide::Server, decision, &head, &mut rng());
        context.unwrap().0.sampled
    };
    assert!(is_sampled(true) && !is_sampled(false));
}

#[test]
fn b3_is_parsed_in_both_formats() {
    let read = |fields: &[(&str, &str)]| of(Tracer::Zipkin(B3), CallSide::Server, fields);
    let short = &TRACE[16..];
    // The server's span has the id of the client's span.
    let (context, form) =
        read(&[("x-b3-traceid", TRACE), ("x-b3-spanid", SPAN), ("x-b3-parentspanid", "2b")]).unwrap();
    assert_eq!((context.trace_id().as_str(), context.span_id().as_str()), (TRACE, SPAN));
    assert_eq!((context.parent, context.sampled, form), (Some(0x2b), true, ContextFormat::Several));
    let (below, _) =
        of(Tracer::Zipkin(B3), CallSide::Client, &[("x-b3-traceid", short), ("x-b3-spanid", SPAN)]).unwrap();
    assert_eq!((below.trace_id().as_str(), below.parent), (short, hex(SPAN.as_bytes()).map(low)));

    for (value, sampled) in [("0", false), ("1", true), ("d", true)] {
        let (context, form) = read(&[("b3", value)]).unwrap();
        assert_eq!((context.parent, context.sampled, form), (None, sampled, ContextFormat::Single));
        let (context, _) = read(&[("b3", &format!("{TRACE}-{SPAN}-{value}-{SPAN}"))]).unwrap();
        assert_eq!((context.trace_id().as_str(), context.sampled), (TRACE, sampled));
        assert_eq!(context.parent, hex(SPAN.as_bytes()).map(low));
    }
    assert!(read(&[("b3", &format!("{short}-{SPAN}"))]).unwrap().0.sampled);
    assert!(!read(&[("x-b3-sampled", "0")]).unwrap().0.sampled);
    // A trace id without a span id is ignored.
    assert_ne!(read(&[("x-b3-traceid", short)]).unwrap().0.trace_id(), short);

    for wrong in [
        "",
        "x",
        "a-b",
        &format!("{short}-{SPAN}-"),
        &format!("{short}-{SPAN}-2"),
        &format!("{TRACE}-{SPAN}-1-2"),
    ] {
        assert_eq!(read(&[("b3", wrong)]), Err(InvalidContext), "{wrong}");
    }
    assert_eq!(read(&[("x-b3-traceid", "z"), ("x-b3-spanid", SPAN)]), Err(InvalidContext));
    assert_eq!(read(&[("x-b3-traceid", short), ("x-b3-spanid", TRACE)]), Err(InvalidContext));
}

#[test]
fn zipkin_can_also_propagate_w3c() {
    let both = Tracer::Zipkin(Zipkin { w3c: true, ..B3 });
    let parent = format!("00-{TRACE}-{SPAN}-00");
    let (context, form) = of(both, CallSide::Server, &[("traceparent", &parent)]).unwrap();
    assert_eq!(
        (context.trace_id().as_str(), context.span_id().as_str(), context.sampled),
        (TRACE, SPAN, false)
    );
    let mut head = head(&[("tracestate", "a=1")]);
    inject(&context, form, both, &mut head);
    assert_eq!(head.header("traceparent"), Some(parent.as_bytes()));
    assert_eq!(
        (head.header("x-b3-traceid"), head.header("x-b3-sampled")),
        (Some(TRACE.as_bytes()), Some(&b"0"[..]))
    );
    assert_eq!(head.header("tracestate"), Some(&b"a=1"[..]));
    // B3 has precedence. An invalid context starts a new trace.
    let (context, _) = of(
        both,
        CallSide::Server,
        &[("traceparent", &parent), ("x-b3-traceid", "1a"), ("x-b3-spanid", "2b")],
    )
    .unwrap();
    assert_eq!(context.trace, 0x1a);
    assert!(of(both, CallSide::Server, &[("traceparent", "x")]).unwrap().0.sampled);
    // Without the setting, W3C headers are ignored.
    assert_ne!(
        of(Tracer::Zipkin(B3), CallSide::Server, &[("traceparent", &parent)]).unwrap().0.trace_id(),
        TRACE
    );
}

#[test]
fn new_zipkin_traces_have_the_configured_length() {
    let new = |zipkin| of(Tracer::Zipkin(zipkin), CallSide::Server, &[]).unwrap().0;
    let short = new(B3);
    assert_eq!((short.trace_id(), short.trace), (short.span_id(), short.span.into()));
    let long = new(OF_128);
    assert_eq!((long.trace_id().len(), low(long.trace)), (32, long.span));
    let timed = new(Zipkin { timed_ids: true, ..OF_128 });
    assert!((timed.trace >> 96).abs_diff(seconds().into()) < 60);
}

proptest! {
    #[test]
    fn written_contexts_are_parsed(trace in 1_u128.., span in 1_u64.., parent: Option<u64>, sampled: bool) {
        let parent = parent.filter(|id| *id != 0);
        for (form, tracer) in [
            (ContextFormat::W3c, Tracer::OpenTelemetry),
            (ContextFormat::Single, Tracer::Zipkin(B3)),
            (ContextFormat::Several, Tracer::Zipkin(B3)),
        ] {
            let written = SpanContext { parent, ..first(trace, span, true, sampled) };
            let mut head = head(&[]);
            inject(&written, form, tracer, &mut head);
            let (read, again) = context(tracer, CallSide::Server, true, &head, &mut rng()).unwrap();
            prop_assert_eq!((read.trace, read.sampled, again), (trace, sampled, form));
            let above = if form == ContextFormat::W3c { (read.parent, None) } else { (Some(read.span), read.parent) };
            prop_assert_eq!(above, (Some(span), if form == ContextFormat::W3c { None } else { parent }));
        }
    }

    #[test]
    fn any_header_is_handled(value in ".{0,80}", name in 0..5_usize) {
        let names = ["traceparent", "b3", "x-b3-traceid", "x-b3-spanid", REQUEST_ID];
        let mut head = head(&[("x-b3-traceid", "1"), ("x-b3-spanid", "2")]);
        head.set(names[name], value.as_bytes());
        decide(&sampling(5_000), RequestIdUse::default(), &mut head, &mut rng());
        for tracer in [Tracer::OpenTelemetry, Tracer::Zipkin(Zipkin { w3c: true, ..B3 })] {
            let _ = context(tracer, CallSide::Client, false, &head, &mut rng());
        }
    }
}
