use std::{sync::Arc, time::Duration};

use super::*;
use skysail_http::head::ResponseHead;
use skysail_policy::config::Cluster;

/// Evaluates an expression for one request.
fn holds(text: &str) -> bool {
    let fields = [("x-a", "one"), ("x-a", "two"), ("user-agent", "u")];
    let head = RequestHead::build("GET", "/p?q=r", "a.b", &fields);
    let response = ResponseHead::build(404, &[("x-b", "three")]);
    let found = serde_json::json!({"filter": {"number": 1, "list": ["a"]}});
    let mut record = Record::new(Direction::Inbound, SystemTime::UNIX_EPOCH);
    record.metadata = found.as_object();
    (record.status, record.duration, record.flags) = (404, Duration::from_millis(1500), Flags::NR);
    record.details = "route_not_found";
    record.bytes_sent = 5;
    let cluster = Arc::new(Cluster::new("c"));
    record.cluster = Some(&cluster);
    record.downstream_remote = Some("1.2.3.4:5".parse().unwrap());
    let peer = Peer::plain();
    peer.set_workload(Some(Arc::new(Workload { app: "shop".into(), ..Workload::default() })));
    record.downstream = Some(&peer);
    let context = Context { record: &record, request: Some(&head), response: Some(&response) };
    let expression = Expression::compile(text).unwrap();
    super::holds(&expression, &context)
}

#[test]
fn attributes_have_envoys_values() {
    for text in [
        "response.code >= 400 || connection.mtls == false",
        "request.headers['X-A'] == 'one,two' && request.headers[':path'] == '/p?q=r'",
        "request.headers['X-A'] == 'one,two' && 'x-a' in request.headers && request.headers != {}",
        "'x-a' in request.headers && !('x-z' in request.headers)",
        "request.path == '/p?q=r' && request.url_path == '/p' && request.query == 'q=r'",
        "request.method + request.host + request.scheme + request.protocol == 'GETa.bhttpHTTP/1.1'",
        "request.useragent == 'u' && !has(request.referer)",
        "request.duration > duration('1s') && request.time < timestamp('2000-01-01T00:00:00Z')",
        "request.size == 0 && request.total_size == 68",
        "response.code_details.startsWith('route') && response.flags == 256",
        "response.headers['x-b'].matches('^th.*e$') && response.size == 5 && response.total_size == 13",
        "metadata.filter_metadata['filter']['number'] == 1.0 && 'a' in metadata.filter_metadata.filter.list",
        "source.address == '1.2.3.4:5' && source.port == 5",
        "xds.cluster_name == 'c' && xds.listener_direction == 1",
        "filter_state.downstream_peer.app == 'shop' && filter_state['downstream_peer'].version == ''",
        "request.headers.exists(name, name.startsWith('x-')) && size(request.headers) == 6",
        "'A'.lowerAscii() == 'a'",
        // A missing value does not affect the other operand.
        "request.headers['none'] == 'a' || response.code == 404",
    ] {
        assert!(holds(text), "{text}");
        assert!(Expression::compile(text).unwrap().unknown().is_empty(), "{text}");
    }
}

#[test]
fn an_evaluation_error_does_not_match() {
    for text in [
        "response.code",
        "request.headers['none'] == 'a'",
        "!(request.headers['none'] == 'a')",
        "response.grpc_status == 0",
        "connection.uri_san_peer_certificate == ''",
        "request.path > 5",
        "nonsense == 1",
        "request.nonsense == 1",
        "nonsense(1)",
    ] {
        assert!(!holds(text), "{text}");
    }
}

#[test]
fn only_attributes_in_use_are_computed() {
    let uses = |text: &str| {
        let mut lines = Vec::new();
        for (root, fields) in Expression::compile(text).unwrap().attributes() {
            for AttributeUse { field, keys, all } in fields {
                let mut keys = keys.clone();
                keys.extend(all.then(|| "*".to_owned()));
                lines.push(format!("{root}.{field} {}", keys.join(",")));
            }
        }
        lines
    };
    assert_eq!(uses("request.path == request['method']"), ["request.path *", "request.method *"]);
    let all = ["xds.cluster_name *", "xds.route_name *", "xds.listener_direction *"];
    assert_eq!(uses("size(xds)"), all);
    assert!(uses("[1].all(request, request > 0)").is_empty());
    let by_name = "'b' in request.headers ? request.headers['a'] : request.headers.c";
    assert_eq!(uses(by_name), ["request.headers b,a,c"]);
    assert_eq!(uses("request.headers['a'] == '' || size(request.headers) > 1"), ["request.headers a,*"]);
    assert_eq!(uses("size(request.headers) > 1 || request.headers['a'] == ''"), ["request.headers a,*"]);
}

#[test]
fn errors_name_the_position() {
    let error = Expression::compile("response.code >=\n= 400").unwrap_err();
    assert!(
        error.starts_with("\"response.code >=\\n= 400\" is not a valid CEL expression; line 2, column 1: "),
        "{error}"
    );
    let expression = Expression::compile("nonsense(request.nothing, xds.node) + other == 'a'.b()").unwrap();
    assert_eq!(expression.unknown(), ["b", "nonsense", "other", "request.nothing", "xds.node"]);
}

#[test]
fn values_are_converted_to_text() {
    let record = Record::new(Direction::Inbound, SystemTime::UNIX_EPOCH);
    let context = Context { record: &record, request: None, response: None };
    for (text, value) in
        [("'a'", Some("a")), ("5", Some("5")), ("true", Some("true")), ("[1]", None), ("request.path", None)]
    {
        assert_eq!(super::text(&Expression::compile(text).unwrap(), &context).as_deref(), value, "{text}");
    }
}

#[test]
fn too_deep_expressions_are_refused_before_they_overflow_the_stack() {
    let chain = |count| format!("1{} == 0", "+1".repeat(count));
    let nested = |count| format!("{}1{} == 1", "(".repeat(count), ")".repeat(count));
    assert!(!holds(&chain(50)));
    assert!(holds(&nested(20)));
    let select = format!("request{}", ".a".repeat(7000));
    let index = format!("[1]{}", "[0]".repeat(5000));
    for deep in [chain(100), chain(8000), nested(1000), nested(8000), select, index] {
        Expression::compile(&deep).map(|_| ()).unwrap_err();
    }
    let long = Expression::compile(&format!("'{}' == ''", "a".repeat(20_000))).unwrap_err();
    assert_eq!(long, "is longer than 16384 bytes");
    // These expressions parse to shallow trees.
    assert!(holds(&format!("true{}", " && true".repeat(500))));
}
