use std::time::{Duration, SystemTime};

use proptest::prelude::*;

use super::*;
use crate::{
    config::{
        http::{Codec, EscapedSlashes, Part, Routes, ServerHeader, Underscores},
        listener::{Cidr, Direction},
    },
    path,
};
use skysail_http::http2::Http2Options;

/// A connection manager that changes nothing.
fn manager() -> HttpManager {
    HttpManager {
        stat_prefix: "test".into(),
        codec: Codec::Auto,
        routes: Routes::Named("80".into()),
        filters: Vec::new(),
        local_replies: Vec::new(),
        processes_responses: false,
        mutates_responses: false,
        stats: None,
        metadata_exchange: None,
        istio_alpn: false,
        host_cache: None,
        upgrades: Vec::new(),
        server: ServerHeader::PassThrough,
        preserve_request_id: false,
        request_id_in_response: false,
        skip_xff_append: false,
        append_forwarded_port: false,
        internal: Vec::new(),
        generate_request_id: false,
        request_id: Default::default(),
        tracing: None,
        client_cert: Default::default(),
        use_remote_address: false,
        xff_trusted_hops: 0,
        normalize_path: false,
        merge_slashes: false,
        escaped_slashes: EscapedSlashes::Keep,
        default_host: None,
        accept_http10: false,
        max_head: 60 * 1024,
        max_headers: 100,
        keep_case: false,
        http2: Http2Options::new(100),
        idle_timeout: None,
        stream_idle_timeout: None,
        max_stream_duration: None,
        underscores: Underscores::Allow,
        max_requests_per_connection: None,
        max_connection_duration: None,
        request_headers_timeout: None,
        request_timeout: None,
        drain_timeout: Duration::ZERO,
        access_logs: Vec::new(),
    }
}

fn text(text: &str) -> Format {
    Format { parts: vec![Part::Text(text.into())] }
}

fn operator(name: &str, argument: Option<&str>) -> Format {
    let argument = argument.map(Into::into);
    Format { parts: vec![Part::Operator { name: name.into(), argument, max_len: None }] }
}

fn value<'a>(head: &'a RequestHead, name: &'a str) -> Option<&'a str> {
    head.header(name).map(|value| std::str::from_utf8(value).unwrap())
}

fn hop(certified: bool, forwarded_cert: Option<&str>) -> Hop<'_> {
    Hop {
        source: "10.0.0.1".parse().unwrap(),
        own: || "192.168.1.1".parse().unwrap(),
        local_port: 8443,
        tls: certified,
        certified,
        forwarded_cert,
    }
}

fn add(action: AppendAction, name: &str, value: Format) -> HeaderOp {
    HeaderOp::Add { name: name.into(), value, action, keep_empty: false }
}

#[test]
fn values_are_computed_before_headers_are_added() {
    let empty = HeaderOp::Add {
        name: "g".into(),
        value: operator("REQ", Some("MISSING")),
        action: AppendAction::Append,
        keep_empty: true,
    };
    let mut head = RequestHead::build("GET", "/a", "old", &[("a", "1"), ("b", "2"), ("c", "3")]);
    let ops = [
        HeaderOp::Remove("a".into()),
        add(AppendAction::Overwrite, "b", text("new")),
        add(AppendAction::Append, "c", operator("REQ", Some("B"))),
        add(AppendAction::AddIfAbsent, "c", text("no")),
        add(AppendAction::AddIfAbsent, "d", operator("REQ", Some(":PATH"))),
        add(AppendAction::OverwriteIfExists, "e", text("no")),
        add(AppendAction::Append, "f", operator("REQ", Some("MISSING"))),
        empty,
    ];
    apply_request(&ops, &mut head, &Record::new(Direction::Outbound, SystemTime::UNIX_EPOCH));
    let fields: Vec<_> = head
        .iter()
        .map(|(name, value)| format!("{}={}", String::from_utf8_lossy(name), String::from_utf8_lossy(value)))
        .collect();
    assert_eq!(fields, ["b=new", "c=3", "c=2", "d=/a", "g="]);

    // Line breaks are removed from values.
    let ops = [add(AppendAction::Overwrite, "x", text("a\r\nb: c"))];
    apply_request(&ops, &mut head, &Record::new(Direction::Outbound, SystemTime::UNIX_EPOCH));
    assert_eq!(head.header("x"), Some(&b"ab: c"[..]));

    let mut answer = ResponseHead::build(200, &[("x", "1")]);
    let ops =
        [add(AppendAction::Overwrite, "x", operator("RESPONSE_CODE", None)), HeaderOp::Remove("y".into())];
    let record = Record { status: 200, ..Record::new(Direction::Outbound, SystemTime::UNIX_EPOCH) };
    apply_response(&ops, &mut answer, Some(&head), &record);
    assert_eq!(answer.header("x"), Some(&b"200"[..]));
}

#[test]
fn trusted_proxies_determine_the_client_address() {
    let edge = |xff_trusted_hops| HttpManager { use_remote_address: true, xff_trusted_hops, ..manager() };
    let inner = |xff_trusted_hops| HttpManager { xff_trusted_hops, ..manager() };
    let cases = [
        (edge(0), Some("1.1.1.1, 2.2.2.2"), "10.0.0.1", Some("1.1.1.1, 2.2.2.2,10.0.0.1")),
        (edge(1), Some("1.1.1.1, 2.2.2.2"), "2.2.2.2", Some("1.1.1.1, 2.2.2.2,10.0.0.1")),
        (edge(3), Some("1.1.1.1, 2.2.2.2"), "10.0.0.1", Some("1.1.1.1, 2.2.2.2,10.0.0.1")),
        (inner(0), Some("1.1.1.1, 2.2.2.2"), "2.2.2.2", Some("1.1.1.1, 2.2.2.2")),
        (inner(1), Some("1.1.1.1, 2.2.2.2"), "1.1.1.1", Some("1.1.1.1, 2.2.2.2")),
        (inner(0), Some("nonsense"), "10.0.0.1", Some("nonsense")),
        (inner(0), None, "10.0.0.1", None),
    ];
    for (manager, before, client, after) in cases {
        let mut head = RequestHead::build("GET", "/", "h", &[]);
        if let Some(before) = before {
            head.append("x-forwarded-for", before.as_bytes());
        }
        let found = receive(&manager, hop(false, None), &mut head, &mut fastrand::Rng::with_seed(1));
        assert_eq!(found.to_string(), client, "{before:?}");
        assert_eq!(value(&head, "x-forwarded-for"), after);
    }
}

#[test]
fn the_port_of_the_connection_is_forwarded() {
    let with = |use_remote_address, xff_trusted_hops| HttpManager {
        append_forwarded_port: true,
        use_remote_address,
        xff_trusted_hops,
        ..manager()
    };
    let cases = [
        (with(true, 0), None, Some("8443")),
        (with(true, 0), Some("1"), Some("8443")),
        (with(true, 1), None, Some("8443")),
        (with(true, 1), Some("1"), Some("1")),
        (with(false, 0), None, None),
        (HttpManager { use_remote_address: true, ..manager() }, None, None),
    ];
    for (manager, before, after) in cases {
        let mut head = RequestHead::build("GET", "/", "h", &[]);
        if let Some(before) = before {
            head.append("x-forwarded-port", before.as_bytes());
        }
        receive(&manager, hop(false, None), &mut head, &mut fastrand::Rng::with_seed(1));
        assert_eq!(value(&head, "x-forwarded-port"), after, "{before:?}");
    }
}

#[test]
fn only_internal_clients_set_retries_by_header() {
    let range = Cidr { address: "10.0.0.0".parse().unwrap(), prefix_len: 8 };
    let with = |use_remote_address, hops| HttpManager {
        use_remote_address,
        xff_trusted_hops: hops,
        internal: vec![range],
        ..manager()
    };
    let unsaid = HttpManager { internal: Vec::new(), ..with(true, 0) };
    let cases = [
        (with(false, 0), Some("10.1.1.1"), true, None),
        (with(false, 0), Some("1.1.1.1"), false, None),
        (with(false, 0), Some("1.1.1.1, 10.1.1.1"), false, None),
        (with(false, 1), Some("10.1.1.1, 10.1.1.1"), false, None),
        (with(false, 0), None, false, None),
        (with(true, 0), None, true, None),
        (with(true, 0), Some("10.1.1.1"), false, Some("10.0.0.1")),
        (with(true, 1), Some("1.1.1.1"), false, Some("1.1.1.1")),
        (unsaid, None, false, Some("10.0.0.1")),
    ];
    for (manager, before, inside, external) in cases {
        let mut head = RequestHead::build("GET", "/", "h", &[("x-envoy-internal", "said")]);
        head.append("x-envoy-retry-on", b"5xx");
        head.append("x-envoy-downstream-service-node", b"node");
        if let Some(before) = before {
            head.append("x-forwarded-for", before.as_bytes());
        }
        receive(&manager, hop(false, None), &mut head, &mut fastrand::Rng::with_seed(1));
        assert_eq!(value(&head, "x-envoy-internal"), inside.then_some("true"), "{before:?}");
        assert_eq!(head.has("x-envoy-retry-on"), inside);
        assert_eq!(value(&head, "x-envoy-external-address"), external);
        assert_eq!(head.has("x-envoy-downstream-service-node"), external.is_none());
    }
}

#[test]
fn a_loopback_client_is_forwarded_with_the_address_of_the_proxy() {
    let mut manager = HttpManager { use_remote_address: true, ..manager() };
    let here = Hop { source: Ipv4Addr::LOCALHOST.into(), ..hop(false, None) };
    for expected in [Some("1.1.1.1,192.168.1.1"), Some("1.1.1.1")] {
        let mut head = RequestHead::build("GET", "/", "h", &[("x-forwarded-for", "1.1.1.1")]);
        receive(&manager, here, &mut head, &mut fastrand::Rng::with_seed(1));
        assert_eq!(value(&head, "x-forwarded-for"), expected);
        manager.skip_xff_append = true;
    }
}

#[test]
fn forwarded_proto_is_kept_only_from_trusted_proxies() {
    for (edge, tls, expected) in [(false, false, "said"), (true, true, "https"), (true, false, "http")] {
        let manager = HttpManager { use_remote_address: edge, ..manager() };
        let mut head = RequestHead::build("GET", "/", "h", &[("x-forwarded-proto", "said")]);
        receive(&manager, Hop { tls, ..hop(false, None) }, &mut head, &mut fastrand::Rng::with_seed(1));
        assert_eq!(value(&head, "x-forwarded-proto"), Some(expected));
        assert_eq!(head.scheme(), if tls { "https" } else { "http" });
    }
}

/// Envoy gives the same values.
#[test]
fn the_authority_is_appended_unless_it_is_the_last_element() {
    for (before, after) in [
        ("a", "a,b"),
        ("a,b", "a,b"),
        ("a, b", "a, b,b"),
        ("b,", "b,"),
        ("a,b,,", "a,b,,"),
        (",", ",,b"),
        ("a, b,", "a, b,,b"),
        ("B", "B,b"),
    ] {
        let mut head = RequestHead::build("GET", "/", "b", &[("x-forwarded-host", before)]);
        append_forwarded_host(&mut head);
        assert_eq!(head.header("x-forwarded-host"), Some(after.as_bytes()), "{before:?}");
    }
}

#[test]
fn client_certificates_are_forwarded_by_mode() {
    use ForwardClientCert as Mode;
    let cases = [
        (Mode::Sanitize, true, None),
        (Mode::Sanitize, false, None),
        (Mode::ForwardOnly, true, Some("old")),
        (Mode::ForwardOnly, false, None),
        (Mode::AppendForward, true, Some("old,new")),
        (Mode::AppendForward, false, None),
        (Mode::SanitizeSet, true, Some("new")),
        (Mode::SanitizeSet, false, None),
        (Mode::AlwaysForwardOnly, true, Some("old")),
        (Mode::AlwaysForwardOnly, false, Some("old")),
    ];
    for (mode, certified, expected) in cases {
        let mut manager = manager();
        manager.client_cert.forward = mode;
        let mut head = RequestHead::build("GET", "/", "h", &[("x-forwarded-client-cert", "old")]);
        receive(&manager, hop(certified, Some("new")), &mut head, &mut fastrand::Rng::with_seed(1));
        assert_eq!(value(&head, "x-forwarded-client-cert"), expected, "{mode:?} {certified}");
    }
}

#[test]
fn request_ids_are_generated_once() {
    let manager = HttpManager { generate_request_id: true, ..manager() };
    let mut head = RequestHead::build("GET", "/", "h", &[]);
    let mut rng = fastrand::Rng::with_seed(1);
    receive(&manager, hop(false, None), &mut head, &mut rng);
    let first = value(&head, "x-request-id").unwrap().to_owned();
    receive(&manager, hop(false, None), &mut head, &mut rng);
    assert_eq!(value(&head, "x-request-id"), Some(first.as_str()));
    let mut edge = HttpManager { use_remote_address: true, preserve_request_id: true, ..manager };
    receive(&edge, hop(false, None), &mut head, &mut rng);
    assert_eq!(value(&head, "x-request-id"), Some(first.as_str()));
    edge.preserve_request_id = false;
    receive(&edge, hop(false, None), &mut head, &mut rng);
    assert_ne!(value(&head, "x-request-id"), Some(first.as_str()));
}

#[test]
fn paths_are_normalised_as_configured() {
    use EscapedSlashes::{Keep, Reject, UnescapeAndForward, UnescapeAndRedirect};
    use path::Normalization;
    let manager = |normalize_path, merge_slashes, escaped_slashes| HttpManager {
        normalize_path,
        merge_slashes,
        escaped_slashes,
        ..manager()
    };
    let cases = [
        (manager(false, false, Keep), "/a/../b//c?x", Normalization::Continue, "/a/../b//c?x"),
        (manager(true, false, Keep), "/a/../b//c?x=/../y", Normalization::Continue, "/b//c?x=/../y"),
        (manager(true, true, Keep), "/a/../b//c%2F", Normalization::Continue, "/b/c%2F"),
        (manager(true, true, UnescapeAndForward), "/a%2f..%2Fb%5cc", Normalization::Continue, "/b/c"),
        (manager(true, true, UnescapeAndRedirect), "/a%2fb?x", Normalization::Redirect, "/a/b?x"),
        (manager(true, true, Reject), "/a%2fb", Normalization::Reject, "/a/b"),
        (manager(true, true, Reject), "/ab?%2f", Normalization::Continue, "/ab?%2f"),
        (manager(true, true, Keep), "/a#b", Normalization::Reject, "/a#b"),
        (manager(true, true, Keep), "*", Normalization::Continue, "*"),
    ];
    for (manager, before, outcome, after) in cases {
        let mut head = RequestHead::build("GET", before, "h", &[]);
        assert_eq!(path::normalize(&manager, &mut head), outcome, "{before}");
        assert_eq!(head.path(), after);
    }
}

proptest! {
    #[test]
    fn request_ids_are_version_4(seed in any::<u64>()) {
        let id = request_id(&mut fastrand::Rng::with_seed(seed));
        let id = std::str::from_utf8(&id).unwrap();
        let form = regex::Regex::new("^[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$");
        prop_assert!(form.unwrap().is_match(id), "{}", id);
    }

    #[test]
    fn any_forwarded_for_is_handled(entry in "[0-9., :a-f]{0,30}", hops in 0_u32..4, edge in any::<bool>()) {
        let manager = HttpManager { use_remote_address: edge, xff_trusted_hops: hops, ..manager() };
        let mut head = RequestHead::build("GET", "/", "h", &[("x-forwarded-for", &entry)]);
        receive(&manager, hop(false, None), &mut head, &mut fastrand::Rng::with_seed(1));
    }
}
