//! An Envoy bootstrap with the features of a sidecar in a mesh.
//!
//! The server's sidecar is PERMISSIVE: two filter chains, selected by the TLS inspector. It checks a policy. The
//! client's sidecar retries as Istio does by default, and so does a gateway, which trusts no header about the client. All
//! count gRPC calls, have Istio's fault and CORS filters, keep metrics and have an admin page.

use std::net::{Ipv4Addr, SocketAddr};

use serde_json::{Value, json};
use skysail_load::grpc::PING;

use crate::{
    access_log::Destination,
    node::{AUTHORIZER, Extra, Node, Protocol, Role},
    token::{AUDIENCE, SUBJECT, Token},
};

const TYPES: &str = "type.googleapis.com/";
/// Key of the claims of a token in the metadata of a request.
const CLAIMS: &str = "payload";

/// Returns the bootstrap of a sidecar.
pub(crate) fn bootstrap(node: &Node<'_>) -> Value {
    let clusters = (0..node.clusters).map(|number| cluster(node, number));
    let clusters: Vec<Value> = clusters.chain(collector(node)).chain(authorizer(node)).collect();
    let mut bootstrap = json!({
        "node": { "id": "sidecar~10.0.0.1~a.default~default.svc.cluster.local", "cluster": "a.default" },
        "admin": { "address": address(local(node.admin)) },
        "static_resources": { "listeners": [listener(node)], "clusters": clusters },
    });
    if matches!(node.extra, Extra::NoTelemetry) {
        bootstrap["stats_config"] = json!({ "stats_matcher": { "reject_all": true } });
    }
    bootstrap
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
        Role::Client | Role::Gateway => json!({
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
    let mut cluster = local_cluster("collector", port);
    cluster["typed_extension_protocol_options"] = http2();
    Some(cluster)
}

/// Returns the cluster of the server of external authorization, if there is one.
fn authorizer(node: &Node<'_>) -> Option<Value> {
    Some(local_cluster(AUTHORIZER, node.authorizer.filter(|_| node.role == Role::Server)?))
}

/// Returns a cluster with a server of the loopback.
fn local_cluster(name: &str, port: u16) -> Value {
    json!({
        "name": name,
        "type": "STATIC",
        "connect_timeout": "5s",
        "load_assignment": {
            "cluster_name": name,
            "endpoints": [{ "lb_endpoints": [{ "endpoint": { "address": address(local(port)) } }] }],
        },
    })
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
        Role::Client | Role::Gateway => {
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
    if node.role == Role::Gateway {
        manager["use_remote_address"] = json!(true);
        manager["forward_client_cert_details"] = json!("SANITIZE_SET");
        manager["set_current_client_cert_details"] =
            json!({ "subject": true, "cert": true, "dns": true, "uri": true });
    }
    let added = |key: &str, value: &str| json!([{ "header": { "key": key, "value": value } }]);
    match node.extra {
        Extra::Rewrite => {
            route["route"]["prefix_rewrite"] = json!("/");
            route["request_headers_to_add"] = added("x-added", "by the route");
        }
        Extra::TokenPolicies(token, _) if node.role != Role::Server => {
            route["request_headers_to_add"] = added("authorization", &format!("Bearer {}", token.text));
        }
        _ => {}
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
    let tokens = |token: &Token, claims: &str| {
        let provider = json!({
            "audiences": [AUDIENCE],
            "local_jwks": { "inline_string": token.keys },
            "payload_in_metadata": claims,
        });
        let rule = json!({ "match": { "prefix": "/" }, "requires": { "provider_name": "user" } });
        let settings = json!({ "providers": { "user": provider }, "rules": [rule] });
        filter("jwt_authn", "JwtAuthentication", settings)
    };
    let mut filters = Vec::new();
    if node.role == Role::Server {
        // Policies about claims need the result of the verification.
        filters.extend(match node.extra {
            Extra::TokenPolicies(token, _) => Some(tokens(token, CLAIMS)),
            _ => None,
        });
        filters.push(filter("rbac", "RBAC", policies(node)));
        filters.extend(node.authorizer.map(|_| {
            let server =
                json!({ "uri": "http://authorizer.mesh.local", "cluster": AUTHORIZER, "timeout": "5s" });
            let settings = json!({ "http_service": { "server_uri": server }, "transport_api_version": "V3" });
            filter("ext_authz", "ExtAuthz", settings)
        }));
    }
    if let Extra::Token(token) = node.extra {
        filters.push(tokens(token, ""));
    }
    if !matches!(node.extra, Extra::NoTelemetry) {
        filters.push(filter(
            "grpc_stats",
            "FilterConfig",
            json!({ "emit_filter_state": true, "stats_for_all_methods": false }),
        ));
    }
    filters.push(filter("fault", "HTTPFault", json!({})));
    filters.push(filter("cors", "Cors", json!({})));
    if matches!(node.extra, Extra::Metrics) {
        let settings = json!({
            "@type": format!("{TYPES}udpa.type.v1.TypedStruct"),
            "type_url": format!("{TYPES}stats.PluginConfig"),
            "value": {},
        });
        filters.push(json!({ "name": "istio.stats", "typed_config": settings }));
    }
    filters.push(filter("router", "Router", json!({})));
    filters
}

/// Returns the policy "this caller may GET and POST below /echo", or call gRPC's ping, in the form that Istio generates.
/// Further policies are about other paths, addresses or subjects of tokens, and are examined before it.
fn policies(node: &Node<'_>) -> Value {
    let who = if node.tls_in() {
        json!({ "authenticated": { "principal_name": { "exact": node.other().id } } })
    } else {
        json!({ "direct_remote_ip": { "address_prefix": "127.0.0.0", "prefix_len": 8 } })
    };
    let any = |rules: Value| json!({ "or_rules": { "rules": rules } });
    let method = |name: &str| json!({ "header": { "name": ":method", "string_match": { "exact": name } } });
    let policy = |path: &str, who: &[Value]| {
        let ids: Vec<Value> = who.iter().map(|id| json!({ "or_ids": { "ids": [id] } })).collect();
        json!({
            "permissions": [{ "and_rules": { "rules": [
                any(json!([{ "url_path": { "path": { "prefix": path } } }])),
                any(json!([method("POST"), method("GET")])),
            ] } }],
            "principals": [{ "and_ids": { "ids": ids } }],
        })
    };
    let path = if node.protocol == Protocol::Grpc { PING } else { "/echo" };
    let name = |policy: &str| format!("ns[default]-policy[{policy}]-rule[0]");
    // Policies are examined in the order of their names.
    let others = |count: &u16, of: &dyn Fn(u16) -> Value| {
        (1..*count).map(|number| (name(&format!("a{number}")), of(number))).collect::<Vec<_>>()
    };
    let mut needed = vec![who.clone()];
    let others = match node.extra {
        Extra::Policies(count) => others(count, &|number| policy(&format!("/other-{number}"), &needed)),
        Extra::Addresses(count) => {
            let address = |prefix: &str, length: u8| json!({ "direct_remote_ip": { "address_prefix": prefix, "prefix_len": length } });
            needed = vec![address("127.0.0.0", 8)];
            others(count, &|number| {
                policy(path, &[address(&format!("10.{}.{}.0", number / 256, number % 256), 24)])
            })
        }
        Extra::TokenPolicies(_, count) => {
            let user = |subject: &str| {
                json!({ "metadata": {
                    "filter": "envoy.filters.http.jwt_authn",
                    "path": [{ "key": CLAIMS }, { "key": "sub" }],
                    "value": { "string_match": { "exact": subject } },
                } })
            };
            needed.push(user(SUBJECT));
            others(count, &|number| policy(path, &[who.clone(), user(&format!("user-{number}"))]))
        }
        _ => Vec::new(),
    };
    let all: serde_json::Map<String, Value> =
        others.into_iter().chain([(name("echo"), policy(path, &needed))]).collect();
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
