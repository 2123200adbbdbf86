//! Decisions about repeated fields: the server may use any of their values, so none may evade a rule.
//!
//! Both proxies get the same file; each path has its own rule.

use std::net::SocketAddr;

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

use crate::{process::Running, program::Program, server::Server, support::within};

/// Path of the rule, its action, and its condition.
#[rustfmt::skip]
const RULES: &[(&str, &str, &str)] = &[
    ("/allow", "ALLOW", "{name: x-tenant, string_match: {exact: good}}"),
    ("/allow-not", "ALLOW", "{name: x-tenant, string_match: {exact: bad}, invert_match: true}"),
    ("/deny", "DENY", "{name: x-tenant, string_match: {exact: bad}}"),
    ("/deny-not", "DENY", "{name: x-tenant, string_match: {exact: good}, invert_match: true}"),
    ("/known", "ALLOW", "{name: authorization, string_match: {exact: good}}"),
    ("/cookie", "DENY", "{name: cookie, string_match: {contains: bad}}"),
    ("/present", "DENY", "{name: upgrade, present_match: true}"),
];

/// Path, fields, and the statuses of the sidecar and of Envoy.
#[rustfmt::skip]
const CASES: &[(&str, &str, u16, u16)] = &[
    ("/allow", "X-Tenant: good\r\n", 200, 200),
    ("/allow", "X-Tenant: good\r\nX-Tenant: good\r\n", 200, 200),
    ("/allow", "X-Tenant: good\r\nX-Tenant: bad\r\n", 403, 200),
    ("/allow", "X-Tenant: bad\r\nX-Tenant: good\r\n", 403, 200),
    ("/allow", "X-Tenant: good, bad\r\n", 403, 403),
    ("/allow-not", "X-Tenant: good\r\nX-Tenant: bad\r\n", 403, 403),
    ("/deny", "X-Tenant: good\r\nX-Tenant: bad\r\n", 403, 403),
    ("/deny", "X-Tenant: bad\r\nX-Tenant: good\r\n", 403, 403),
    ("/deny-not", "X-Tenant: good\r\n", 200, 200),
    ("/deny-not", "X-Tenant: good\r\nX-Tenant: bad\r\n", 403, 200),
    ("/deny-not", "X-Tenant: bad\r\nX-Tenant: good\r\n", 403, 200),
    ("/known", "Authorization: good\r\n", 200, 200),
    ("/known", "Authorization: good\r\nAuthorization: bad\r\n", 403, 403),
    ("/known", "Authorization: bad\r\nAuthorization: good\r\n", 403, 403),
    ("/cookie", "Cookie: a=good\r\nCookie: a=bad\r\n", 403, 403),
    ("/cookie", "Cookie: a=good\r\nCookie: a=fine\r\n", 200, 200),
    // Regression test: the filters must be evaluated.
    ("/present", "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: websocket\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n", 403, 403),
    ("/present", "Connection: Upgrade\r\nUpgrade: websocket\r\n", 403, 403),
    // It is ignored as if it were absent.
    ("/present", "Connection: Upgrade\r\nUpgrade: h2c\r\n", 200, 200),
];

fn bootstrap(server: SocketAddr) -> String {
    let rbac = "type.googleapis.com/envoy.extensions.filters.http.rbac.v3";
    let routes: String = RULES
        .iter()
        .map(|(path, action, header)| {
            format!(
                r#"
              - match: {{path: {path}}}
                route: {{cluster: server}}
                typed_per_filter_config:
                  rbac:
                    "@type": {rbac}.RBACPerRoute
                    rbac:
                      rules:
                        action: {action}
                        policies: {{p: {{permissions: [{{header: {header}}}], principals: [{{any: true}}]}}}}"#
            )
        })
        .collect();
    format!(
        r#"
node: {{id: a}}
admin: {{address: {{socket_address: {{address: 127.0.0.1, port_value: 0}}}}}}
static_resources:
  listeners:
  - name: cases
    address: {{socket_address: {{address: 127.0.0.1, port_value: 0}}}}
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: cases
          upgrade_configs: [{{upgrade_type: websocket}}]
          route_config:
            virtual_hosts:
            - name: all
              domains: ["*"]
              routes:{routes}
          http_filters:
          - name: rbac
            typed_config: {{"@type": {rbac}.RBAC}}
          - name: envoy.filters.http.router
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router
  clusters:
  - name: server
    type: STATIC
    connect_timeout: 5s
    load_assignment:
      cluster_name: server
      endpoints:
      - lb_endpoints:
        - endpoint: {{address: {{socket_address: {{address: 127.0.0.1, port_value: {}}}}}}}
"#,
        server.port()
    )
}

/// Returns the status of the response and the number of requests that reached the server.
async fn ask(address: SocketAddr, server: &Server, path: &str, fields: &str) -> (u16, usize) {
    let mut stream = within(TcpStream::connect(address)).await.unwrap();
    // A refused upgrade closes the connection too.
    let close = if fields.contains("Connection") { "" } else { "Connection: close\r\n" };
    let request = format!("GET {path} HTTP/1.1\r\nHost: a\r\n{close}{fields}\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let (mut received, mut block) = (Vec::new(), [0; 4096]);
    while !received.ends_with(b"\r\n\r\nfine") {
        match within(stream.read(&mut block)).await {
            Ok(count @ 1..) => received.extend_from_slice(&block[..count]),
            _ => break,
        }
    }
    let status = String::from_utf8_lossy(&received).get(9..12).and_then(|status| status.parse().ok());
    (status.unwrap_or(0), server.requests().len())
}

async fn check(address: SocketAddr, server: &Server, expected: impl Fn(u16, u16) -> u16) {
    let mut wrong = Vec::new();
    for (path, fields, ours, theirs) in CASES {
        let status = expected(*ours, *theirs);
        let got = ask(address, server, path, fields).await;
        if got != (status, usize::from(status == 200)) {
            wrong.push(format!("{path} with {fields:?}: expected {status}, got {got:?}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[tokio::test]
async fn no_value_evades_a_rule() {
    let (server, address) = Server::start().await;
    let folder = tempfile::tempdir().unwrap();
    let program = Program::start(folder.path(), &bootstrap(address)).await;
    check(program.listener("cases").await, &server, |ours, _| ours).await;
}

#[tokio::test]
async fn envoys_decisions_are_those_of_the_table() {
    let (server, address) = Server::start().await;
    let envoy = Running::start(&bootstrap(address)).await;
    check(envoy.listener("cases").await, &server, |_, theirs| theirs).await;
}
