//! An Envoy bootstrap with the features of a sidecar in a mesh.
//!
//! The server's sidecar is PERMISSIVE: two filter chains, selected by the TLS inspector. It checks a policy. The
//! client's sidecar retries as Istio does by default. Both count gRPC calls, have Istio's fault and CORS filters, keep
//! metrics and have an admin page.

use std::net::{Ipv4Addr, SocketAddr};

use serde_json::{Value, json};
use skysail_load::grpc::PING;

use crate::{
    access_log::Destination,
    node::{Extra, Node, Protocol, Role},
    token::AUDIENCE,
};

const TYPES: &str = "type.googleapis.com/";

/// Returns the bootstrap of a sidecar.
pub(crate) fn bootstrap(node: &Node<'_>) -> Value {
    let clusters = (0..node.clusters).map(|number| cluster(node, number));
    let clusters: Vec<Value> = clusters.chain(collector(node)).collect();
    json!({
        "node": { "id": "sidecar~10.0.0.1~a.default~default.svc.cluster.local", "cluster": "a.default" },
        "admin": { "address": address(local(node.admin)) },
        "static_resources": { "listeners": [listener(node)], "clusters": clusters },
    })
}

fn listener(node: &Node<'_>) -> Value {
    let filter = match node.protocol {
        Protocol::Http1 | Protocol::Http2 | Protocol::Grpc => http_connection_manager(node),
        Protocol::Tcp | Protocol::Echo => json!({
            "name": "envoy.filters.network.tcp_proxy",
            "typed_config":
                typed("filters.network.tcp_proxy.v3.TcpProxy", json!({ "stat_prefix": "tcp", "cluster": "up" })),
        }),
    };
    let filters = json!([filter]);
    match node.role {
        Role::Client => json!({
            "name": "outbound", "address": address(node.listen), "filter_chains": [{ "filters": filters }],
        }),
        Role::Server => json!({
            "name": "inbound",
            "address": address(node.listen),
            "listener_filters": [{
                "name": "envoy.filters.listener.tls_inspector",
                "typed_config": typed("filters.listener.tls_inspector.v3.TlsInspector", json!({})),
            }],
            "filter_chains": [
                {
                    "filter_chain_match": { "transport_protocol": "tls" },
                    "transport_socket": tls(node, "DownstreamTlsContext", json!({ "require_client_certificate": true })),
                    "filters": filters,
                },
                { "filter_chain_match": { "transport_protocol": "raw_buffer" }, "filters": filters },
            ],
        }),
    }
}

/// Returns a cluster: number 0, which is used, or one of the unused ones.
fn cluster(node: &Node<'_>, number: u16) -> Value {
    let many = 100_000;
    let (name, endpoint) = if number == 0 {
        ("up".to_owned(), node.upstream)
    } else {
        (format!("other-{number}"), local(number))
    };
    let mut cluster = json!({
        "name": name,
        "type": "STATIC",
        "connect_timeout": "5s",
        "lb_policy": "LEAST_REQUEST",
        "load_assignment": {
            "cluster_name": name,
            "endpoints": [{ "lb_endpoints": [{ "endpoint": { "address": address(endpoint) } }] }],
        },
        "circuit_breakers": { "thresholds": [{
            "max_connections": many, "max_pending_requests": many, "max_requests": many, "max_retries": many,
        }] },
    });
    if number == 0 {
        cluster["alt_stat_name"] = json!("outbound|8080||server.mesh.local");
    }
    if node.protocol.is_http2() {
        cluster["typed_extension_protocol_options"] = http2();
    }
    if node.tls_out() {
        cluster["transport_socket"] = tls(node, "UpstreamTlsContext", json!({ "sni": node.other().dns }));
    }
    cluster
}

/// Returns the cluster of the collector of the access log, if there is one.
fn collector(node: &Node<'_>) -> Option<Value> {
    let Some(Destination::Otlp(port)) = node.access_log else { return None };
    Some(json!({
        "name": "collector",
        "type": "STATIC",
        "connect_timeout": "5s",
        "load_assignment": {
            "cluster_name": "collector",
            "endpoints": [{ "lb_endpoints": [{ "endpoint": { "address": address(local(port)) } }] }],
        },
        "typed_extension_protocol_options": http2(),
    }))
}

/// Returns the options of a cluster that speaks HTTP/2.
fn http2() -> Value {
    json!({
        "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": typed(
            "upstreams.http.v3.HttpProtocolOptions",
            json!({ "explicit_http_config": { "http2_protocol_options": {} } }),
        ),
    })
}

fn http_connection_manager(node: &Node<'_>) -> Value {
    let mut route = json!({
        "name": "default",
        "match": { "prefix": "/" },
        "route": { "cluster": "up", "timeout": "0s" },
        "decorator": { "operation": "server.mesh.local:8080/*" },
    });
    let mut manager = json!({
        "codec_type": "AUTO",
        "stat_prefix": "outbound_0.0.0.0_8080",
        "server_name": "istio-envoy",
        "use_remote_address": false,
        "normalize_path": true,
        "path_with_escaped_slashes_action": "KEEP_UNCHANGED",
        "stream_idle_timeout": "0s",
        "upgrade_configs": [{ "upgrade_type": "websocket" }],
        "request_id_extension": { "typed_config":
            typed("request_id.uuid.v3.UuidRequestIdConfig", json!({ "use_request_id_for_trace_sampling": true })) },
        "http_filters": http_filters(node),
    });
    match node.role {
        Role::Server => {
            manager["stat_prefix"] = json!("inbound_0.0.0.0_8080");
            manager["forward_client_cert_details"] = json!("APPEND_FORWARD");
            manager["set_current_client_cert_details"] = json!({ "subject": true, "dns": true, "uri": true });
        }
        Role::Client => {
            route["route"]["max_grpc_timeout"] = json!("0s");
            route["route"]["retry_policy"] = json!({
                "retry_on": "connect-failure,refused-stream,unavailable,cancelled,retriable-status-codes",
                "num_retries": 2,
                "retry_host_predicate": [{
                    "name": "envoy.retry_host_predicates.previous_hosts",
                    "typed_config": typed("retry.host.previous_hosts.v3.PreviousHostsPredicate", json!({})),
                }],
                "host_selection_retry_max_attempts": "5",
                "retriable_status_codes": [503],
            });
        }
    }
    if matches!(node.extra, Extra::Rewrite) {
        route["route"]["prefix_rewrite"] = json!("/");
        route["request_headers_to_add"] =
            json!([{ "header": { "key": "x-added", "value": "by the route" } }]);
    }
    if let Some(destination) = &node.access_log {
        manager["access_log"] = json!([destination.configuration()]);
    }
    let host = |name: &str, domain: &str| json!({ "name": name, "domains": [domain], "routes": [route] });
    let hosts = match node.extra {
        Extra::Hosts(count) => (1..*count)
            .map(|number| host(&format!("host-{number}"), &format!("service-{number}.mesh.local")))
            .chain([host("host-0", "server.mesh.local")])
            .collect(),
        _ => vec![host("inbound|http|8080", "*")],
    };
    manager["route_config"] = json!({ "name": "r", "virtual_hosts": hosts, "validate_clusters": false });
    json!({
        "name": "envoy.filters.network.http_connection_manager",
        "typed_config": typed("filters.network.http_connection_manager.v3.HttpConnectionManager", manager),
    })
}

fn http_filters(node: &Node<'_>) -> Vec<Value> {
    let filter = |name: &str, message: &str, settings: Value| {
        json!({ "name": format!("envoy.filters.http.{name}"),
                "typed_config": typed(&format!("filters.http.{name}.v3.{message}"), settings) })
    };
    let mut filters = Vec::new();
    if node.role == Role::Server {
        filters.push(filter("rbac", "RBAC", policies(node)));
    }
    if let Extra::Token(token) = node.extra {
        let provider = json!({ "audiences": [AUDIENCE], "local_jwks": { "inline_string": token.keys } });
        let rule = json!({ "match": { "prefix": "/" }, "requires": { "provider_name": "user" } });
        let settings = json!({ "providers": { "user": provider }, "rules": [rule] });
        filters.push(filter("jwt_authn", "JwtAuthentication", settings));
    }
    filters.push(filter(
        "grpc_stats",
        "FilterConfig",
        json!({ "emit_filter_state": true, "stats_for_all_methods": false }),
    ));
    filters.push(filter("fault", "HTTPFault", json!({})));
    filters.push(filter("cors", "Cors", json!({})));
    filters.push(filter("router", "Router", json!({})));
    filters
}

/// Returns the policy "this caller may GET and POST below /echo", or call gRPC's ping, in the form that Istio generates.
/// Further policies are about other paths and are examined before it.
fn policies(node: &Node<'_>) -> Value {
    let who = if node.tls_in() {
        json!({ "authenticated": { "principal_name": { "exact": node.other().id } } })
    } else {
        json!({ "direct_remote_ip": { "address_prefix": "127.0.0.0", "prefix_len": 8 } })
    };
    let any = |rules: Value| json!({ "or_rules": { "rules": rules } });
    let method = |name: &str| json!({ "header": { "name": ":method", "string_match": { "exact": name } } });
    let policy = |path: &str| {
        json!({
            "permissions": [{ "and_rules": { "rules": [
                any(json!([{ "url_path": { "path": { "prefix": path } } }])),
                any(json!([method("POST"), method("GET")])),
            ] } }],
            "principals": [{ "and_ids": { "ids": [{ "or_ids": { "ids": [who] } }] } }],
        })
    };
    let path = if node.protocol == Protocol::Grpc { PING } else { "/echo" };
    let name = |policy: &str| format!("ns[default]-policy[{policy}]-rule[0]");
    let mut all = serde_json::Map::from_iter([(name("echo"), policy(path))]);
    if let Extra::Policies(count) = node.extra {
        // Policies are examined in the order of their names.
        all.extend(
            (1..*count).map(|number| (name(&format!("a{number}")), policy(&format!("/other-{number}")))),
        );
    }
    json!({ "rules": { "action": "ALLOW", "policies": all } })
}

fn tls(node: &Node<'_>, kind: &str, mut settings: Value) -> Value {
    let own = node.own();
    settings["common_tls_context"] = json!({
        "tls_params": {
            "tls_minimum_protocol_version": "TLSv1_3",
            "tls_maximum_protocol_version": "TLSv1_3",
            "ecdh_curves": ["X25519"],
        },
        "tls_certificates": [{
            "certificate_chain": { "filename": own.certificate },
            "private_key": { "filename": own.key },
        }],
        "validation_context": {
            "trusted_ca": { "filename": node.certificates.root },
            "match_typed_subject_alt_names": [{ "san_type": "URI", "matcher": { "exact": node.other().id } }],
        },
        "alpn_protocols": [if node.protocol.is_http2() { "h2" } else { "http/1.1" }],
    });
    json!({
        "name": "envoy.transport_sockets.tls",
        "typed_config": typed(&format!("transport_sockets.tls.v3.{kind}"), settings),
    })
}

fn local(port: u16) -> SocketAddr {
    (Ipv4Addr::LOCALHOST, port).into()
}

fn address(of: SocketAddr) -> Value {
    json!({ "socket_address": { "address": of.ip(), "port_value": of.port() } })
}

fn typed(message: &str, mut settings: Value) -> Value {
    settings["@type"] = json!(format!("{TYPES}envoy.extensions.{message}"));
    settings
}
