//! Effects of patches that one request of a workload shows.

use std::fs;

use crate::scene::{Observed, Scene, Side};

/// A patch whose effect a request shows.
struct Effect {
    /// File with the patch.
    file: &'static str,
    /// Texts of the file that are replaced, so that one request shows the effect.
    changes: &'static [(&'static str, &'static str)],
    path: &'static str,
    arguments: &'static [&'static str],
    status: u16,
    /// Text that the head or the body of the response has, and lacks without the patch.
    has: &'static str,
    /// The proxies that have the effect; `None` for both.
    only: Option<Side>,
}

/// An effect of a file as it is on a request without arguments.
const fn effect(file: &'static str, path: &'static str, status: u16, has: &'static str) -> Effect {
    Effect { file, changes: &[], path, arguments: &[], status, has, only: None }
}

/// The filters ask services of the pod `helper`, not the patched workload itself.
const HELPER_HTTP: (&str, &str) = ("outbound|80||stock.shop", "outbound|80||helper.shop");
const HELPER_GRPC: (&str, &str) = ("outbound|80||stock.shop", "outbound|9081||helper.shop");

const EFFECTS: &[Effect] = &[
    effect("lua.yaml", "/", 200, "x-lua: added"),
    effect("header-mutation.yaml", "/", 200, "\"x-mesh\":\"shop\""),
    effect("response-headers.yaml", "/", 200, "\"x-port\":\"80\""),
    effect("xff.yaml", "/", 200, "\"x-forwarded-for\":"),
    effect("request-id.yaml", "/", 200, "\nx-request-id: "),
    effect("merge-slashes.yaml", "/a//b", 200, "\"path\":\"/a/b\""),
    effect("escaped-slashes.yaml", "/a%2Fb", 400, ""),
    effect("jwt.yaml", "/", 401, "Jwt is missing"),
    effect("local-rate-limit.yaml", "/", 429, "x-local-rate-limit: true"),
    Effect {
        arguments: &["-H", "accept-encoding: gzip"],
        ..effect("compressor.yaml", "/", 200, "content-encoding: gzip")
    },
    Effect {
        arguments: &["-H", "content-encoding: gzip", "-d", "@config/gzip"],
        ..effect("decompressor.yaml", "/", 200, "\"body\":\"counted\\n\"")
    },
    Effect {
        arguments: &[
            "-X",
            "OPTIONS",
            "-H",
            "origin: https://shop.example.com",
            "-H",
            "access-control-request-method: GET",
        ],
        ..effect("cors.yaml", "/", 200, "access-control-allow-methods: GET,POST")
    },
    Effect {
        changes: &[("numerator: 10,", "numerator: 100,")],
        ..effect("fault.yaml", "/", 503, "fault filter abort")
    },
    Effect {
        changes: &[("timeout: 11s", "timeout: 0.2s")],
        ..effect("route-timeout.yaml", "/delay/2s", 504, "upstream request timeout")
    },
    Effect {
        changes: &[("stream_idle_timeout: 30s", "stream_idle_timeout: 0.2s")],
        ..effect("idle-timeouts.yaml", "/delay/2s", 504, "stream timeout")
    },
    Effect {
        changes: &[("max_requests: 100", "max_requests: 0")],
        ..effect("circuit-breaker.yaml", "/", 503, "x-envoy-overloaded: true")
    },
    // Without the patch, the response is that to the last of two retries.
    Effect {
        changes: &[("value: 25", "value: 0"), ("min_retry_concurrency: 5", "min_retry_concurrency: 0")],
        ..effect("retry-budget.yaml", "/?status=503", 503, "\"x-envoy-attempt-count\":\"1\"")
    },
    Effect {
        changes: &[("max_request_bytes: 65536", "max_request_bytes: 4")],
        arguments: &["-d", "12345"],
        ..effect("body-limit.yaml", "/", 413, "")
    },
    Effect {
        changes: &[HELPER_HTTP],
        ..effect("ext-authz.yaml", "/?status=401", 401, "\"path\":\"/check/?status=401\"")
    },
    Effect { changes: &[HELPER_GRPC], ..effect("ext-proc.yaml", "/", 200, "\"x-processed\":\"/\"") },
    Effect {
        changes: &[HELPER_GRPC],
        ..effect("global-rate-limit.yaml", "/limited", 429, "x-descriptor: shop path=/limited")
    },
    // A route leads to the cluster, and its server is in the mesh.
    Effect {
        changes: &[
            ("  configPatches:\n", ADDED_HOST),
            ("limiter.example.com, port_value: 8081", "helper.shop.svc.cluster.local, port_value: 80"),
        ],
        arguments: &["-H", "host: limiter.example.com"],
        ..effect("added-cluster.yaml", "/", 200, "\"name\":\"helper\"")
    },
    // A body that a filter reads as a whole must fit into the buffer. The sidecar's buffers are smaller, and
    // the bodies that its filters read have limits of their own.
    Effect {
        changes: &[("  configPatches:\n", READS_BODY)],
        arguments: &["-d", "@config/large"],
        only: Some(Side::Envoy),
        ..effect("buffer-limit.yaml", "/", 413, "")
    },
];

const ADDED_HOST: &str = "  configPatches:
  - applyTo: VIRTUAL_HOST
    match: {context: SIDECAR_OUTBOUND, routeConfiguration: {name: '80'}}
    patch:
      operation: ADD
      value:
        name: limiter
        domains: [limiter.example.com]
        routes: [{match: {prefix: /}, route: {cluster: limiter}}]
";

const READS_BODY: &str = r#"  configPatches:
  - applyTo: HTTP_FILTER
    match:
      context: SIDECAR_INBOUND
      listener:
        filterChain:
          filter:
            name: envoy.filters.network.http_connection_manager
            subFilter: {name: envoy.filters.http.router}
    patch:
      operation: INSERT_BEFORE
      value:
        name: envoy.filters.http.lua
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.http.lua.v3.Lua
          default_source_code: {inline_string: "function envoy_on_request(handle) handle:body() end"}
"#;

/// `counted`, a line, by gzip.
const GZIP: [u8; 28] =
    [31, 139, 8, 0, 0, 0, 0, 0, 2, 3, 75, 206, 47, 205, 43, 73, 77, 225, 2, 0, 222, 104, 80, 112, 8, 0, 0, 0];

/// Returns the files with these effects.
pub(crate) fn files() -> impl Iterator<Item = &'static str> {
    EFFECTS.iter().map(|effect| effect.file)
}

/// Checks that each patch acts on a request.
pub(crate) fn check(scene: &Scene) {
    fs::write(scene.mesh.config().join("gzip"), GZIP).unwrap();
    fs::write(scene.mesh.config().join("large"), "x".repeat(100_000)).unwrap();
    for effect in EFFECTS.iter().filter(|effect| effect.only.is_none_or(|only| only == scene.side)) {
        let url = format!("http://stock.shop{}", effect.path);
        scene.compare(effect.file, effect.changes, |scene| {
            let arguments = [&["-i", "--max-time", "5"], effect.arguments].concat();
            let answer = scene.mesh.call("front", &url, &arguments);
            let acts = |status| status == effect.status && answer.body.contains(effect.has);
            Observed { acts: answer.status.map(acts), text: format!("{answer:?}") }
        });
    }
    scene.assert_accepted();
}
