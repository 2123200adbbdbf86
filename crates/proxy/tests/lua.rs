//! Lua scripts over real sockets: the API, the settings, and the limits.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test ends with the first thing that goes wrong"
)]

#[path = "support/files.rs"]
mod files;
#[path = "support/program.rs"]
mod program;
mod support;
#[path = "support/tls.rs"]
mod tls;

use std::net::SocketAddr;

use files::{bootstrap, cluster, filter, http, listener, to, with};
use program::Program;
use serde_json::{Value, json};
use support::{Client, echo, server};
use tokio::net::TcpStream;

/// A sidecar with one listener, in front of a server that repeats the request.
struct Case {
    program: Program,
    proxy: SocketAddr,
    _folder: tempfile::TempDir,
}

impl Case {
    /// Starts a sidecar with this script for all requests.
    async fn new(script: &str) -> Self {
        Self::with(&[lua(&json!({"default_source_code": {"inline_string": script}}))], &to("a"), echo().await)
            .await
    }

    async fn with(filters: &[Value], routes: &Value, server: SocketAddr) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let listener = listener("one", &[http(filters, routes, &json!({}))]);
        let clusters = [cluster("a", server, false), cluster("b", reply_server().await, false)];
        let program = Program::start(folder.path(), &bootstrap(&[listener], &clusters)).await;
        let proxy = program.listener("one").await;
        Self { program, proxy, _folder: folder }
    }

    /// Sends a request and returns the response.
    async fn send(&self, request: &str) -> String {
        let mut client = Client::new(TcpStream::connect(self.proxy).await.unwrap());
        client.send(request).await;
        client.rest().await.to_ascii_lowercase()
    }

    async fn get(&self, path: &str) -> String {
        self.send(&format!("GET {path} HTTP/1.1\r\nhost: h\r\nx-in: 1\r\nconnection: close\r\n\r\n")).await
    }

    async fn post(&self, body: &str) -> String {
        let length = body.len();
        self.send(&format!(
            "POST /p HTTP/1.1\r\nhost: h\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n{body}"
        ))
        .await
    }

    /// Returns the value of a counter of the connection manager.
    async fn counter(&self, name: &str) -> u64 {
        let metrics = self.program.page("GET", "/stats/prometheus").await;
        let line = metrics.lines().find(|line| line.starts_with(&format!("{name}{{")));
        line.map_or(0, |line| line.rsplit(' ').next().unwrap().parse().unwrap())
    }
}

fn lua(config: &Value) -> Value {
    with(filter("http.lua.v3.Lua", config), &json!({"name": "lua"}))
}

/// Returns a route that sets this for the Lua filter.
fn route(path: &str, setting: &Value) -> Value {
    let setting = with(
        json!({"@type": "type.googleapis.com/envoy.extensions.filters.http.lua.v3.LuaPerRoute"}),
        setting,
    );
    json!({
        "match": {"prefix": path},
        "route": {"cluster": "a"},
        "name": path,
        "typed_per_filter_config": {"lua": setting}
    })
}

/// Starts a server whose response has repeated fields and the request's line as its body.
async fn reply_server() -> SocketAddr {
    server(|_, mut client: Client| async move {
        while let Some((head, body)) = client.message_if_any().await {
            let body = format!("{}|{body}", head.lines().next().unwrap_or_default());
            let length = body.len();
            let head = "HTTP/1.1 200 OK\r\nkey: v0\r\nkey: v1\r\nfoo: bar\r\n";
            client.send(&format!("{head}content-length: {length}\r\n\r\n{body}")).await;
        }
    })
    .await
}

#[track_caller]
fn has(response: &str, text: &str) {
    assert!(response.contains(text), "no {text:?} in {response}");
}

#[tokio::test]
async fn headers_are_read_and_changed() {
    let case = Case::new(
        r#"
        function envoy_on_request(handle)
            local headers = handle:headers()
            headers:add("x-many", "a")
            headers:add("X-Many", "b")
            headers:add("x-all", headers:get("x-many") .. ";" .. headers:getNumValues("x-many"))
            headers:add("x-second", headers:getAtIndex("x-many", 1))
            headers:add("x-none", tostring(headers:getAtIndex("x-many", 2)) .. tostring(headers:get("x-nowhere")))
            headers:replace("x-in", "2")
            headers:add("x-line", headers:get(":method") .. headers:get(":authority") .. headers:get(":scheme"))
            headers:replace(":path", "/other")
            local names = {}
            for key, value in pairs(headers) do names[#names + 1] = key .. "=" .. value end
            headers:add("x-names", table.concat(names, "|"))
            headers:remove("x-many")
        end
        function envoy_on_response(handle)
            local headers = handle:headers()
            headers:add("x-status", headers:get(":status"))
            headers:replace(":status", "201")
        end
        "#,
    )
    .await;
    let response = case.get("/path").await;
    has(&response, "http/1.1 201 ");
    has(&response, "x-status: 200");
    for field in [
        "get /other http/1.1",
        "x-all: a,b;2",
        "x-second: b",
        "x-none: nilnil",
        "x-in: 2",
        "x-line: gethhttp",
        "x-names: :authority=h|:path=/other|:method=get|:scheme=http|",
    ] {
        has(&response, field);
    }
    assert!(!response.contains("\nx-many"), "{response}");
}

#[tokio::test]
async fn a_new_path_selects_the_route_again_unless_configured() {
    let script = r#"function envoy_on_request(handle) handle:headers():replace(":path", "/b") end"#;
    let explicit = r#"function envoy_on_request(handle)
        handle:headers():replace(":path", "/b")
        handle:clearRouteCache()
    end"#;
    for (script, clear, expected) in [(script, true, "b"), (script, false, "a"), (explicit, false, "b")] {
        let config = json!({"default_source_code": {"inline_string": script}, "clear_route_cache": clear});
        let routes = json!([
            {"match": {"prefix": "/a"}, "direct_response": {"status": 200, "body": {"inline_string": "is a"}}},
            {"match": {"prefix": "/b"}, "direct_response": {"status": 200, "body": {"inline_string": "is b"}}}
        ]);
        let case = Case::with(&[lua(&config)], &routes, echo().await).await;
        has(&case.get("/a").await, &format!("is {expected}"));
    }
}

#[tokio::test]
async fn bodies_are_read_and_replaced() {
    let case = Case::new(
        r#"
        function envoy_on_request(handle)
            local body = handle:body()
            if body == nil then
                handle:headers():add("x-body", "none")
                return
            end
            handle:headers():add("x-body", body:length() .. body:getBytes(1, 3))
            handle:headers():add("x-bad", tostring(pcall(body.getBytes, body, 1, 100)))
            body:setBytes("changed")
        end
        function envoy_on_response(handle)
            local body = handle:body(true)
            handle:headers():add("x-length", body:length())
            body:setBytes("[" .. body:getBytes(0, body:length()) .. "]")
        end
        "#,
    )
    .await;
    let response = case.post("abcdef").await;
    for part in ["x-body: 6bcd", "x-bad: false", "[", "changed]"] {
        has(&response, part);
    }
    let (head, body) = response.split_once("\r\n\r\n").unwrap();
    has(head, &format!("content-length: {}", body.len()));
    has(&case.get("/").await, "x-body: none");
}

#[tokio::test]
async fn chunks_and_trailers_are_iterated_and_changed() {
    let script = r#"
        function envoy_on_request(handle)
            local total, last = 0, nil
            for chunk in handle:bodyChunks() do
                total, last = total + chunk:length(), chunk
            end
            last:setBytes(last:getBytes(0, last:length()) .. "!")
            handle:headers():add("x-total", total)
            local trailers = handle:trailers()
            handle:headers():add("x-trailer", trailers:get("x-t"))
            trailers:add("x-u", "2")
            handle:headers():add("x-late", tostring(pcall(handle.respond, handle, {[":status"] = "403"}, "")))
        end
    "#;
    let all = server(|_, mut client: Client| async move {
        let head = client.head().await;
        let answer = head + &client.until("\r\n0\r\n").await + &client.until("\r\n\r\n").await;
        client.send(&format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{answer}", answer.len())).await;
    })
    .await;
    let filter = lua(&json!({"default_source_code": {"inline_string": script}}));
    let case = Case::with(&[filter], &to("a"), all).await;
    let request = "POST / HTTP/1.1\r\nhost: h\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n";
    let response = case.send(&format!("{request}3\r\nabc\r\n2\r\nde\r\n0\r\nx-t: 1\r\n\r\n")).await;
    for part in ["x-total: 5", "x-trailer: 1", "x-late: false", "abcde!", "x-u: 2"] {
        has(&response, part);
    }
}

#[tokio::test]
async fn a_script_answers_a_request() {
    let case = Case::new(
        r#"
        function envoy_on_request(handle)
            handle:respond({[":status"] = "403", ["x-who"] = {"a", "b"}}, "nope")
            error("not reached")
        end
        function envoy_on_response(handle)
            handle:headers():add("x-seen", handle:headers():get(":status"))
        end
        "#,
    )
    .await;
    let response = case.get("/").await;
    for part in ["http/1.1 403 ", "x-who: a", "x-who: b", "x-seen: 403", "content-length: 4", "\r\n\r\nnope"]
    {
        has(&response, part);
    }
    assert_eq!(case.counter("envoy_http_lua_errors").await, 0);
    assert_eq!(case.counter("envoy_http_lua_executions").await, 2);
}

#[tokio::test]
async fn scripts_call_clusters() {
    let case = Case::new(
        r#"
        local function fields(path)
            return {[":method"] = "POST", [":path"] = path, [":authority"] = "b", ["x-a"] = {"1", "2"}}
        end
        function envoy_on_request(handle)
            local headers, body = handle:httpCall("b", fields("/one"), "hello", 5000)
            handle:headers():add("x-call", headers[":status"] .. headers["foo"] .. headers["key"] .. " " .. body)
            headers = handle:httpCall("b", fields("/two"), nil, {timeout_ms = 5000, return_duplicate_headers = true})
            handle:headers():add("x-all", table.concat(headers["key"], "+"))
            handle:httpCall("b", fields("/three"), "", 5000, true)
            local ok, problem = pcall(function() return handle:httpCall("c", fields("/"), "", 5000) end)
            handle:headers():add("x-unknown", tostring(ok) .. problem)
            ok, problem = pcall(function() return handle:httpCall("b", {[":path"] = "/"}, "", 5000) end)
            handle:headers():add("x-missing", problem)
        end
        function envoy_on_response(handle)
            local headers, body = handle:httpCall("b", fields("/four"), "", 5000)
            handle:headers():add("x-four", body)
        end
        "#,
    )
    .await;
    let response = case.get("/").await;
    for part in [
        "x-call: 200barv1 post /one http/1.1|hello",
        "x-all: v0+v1",
        "x-unknown: false",
        "http call cluster invalid",
        "must include ':path', ':method', and ':authority'",
        "x-four: post /four http/1.1|",
    ] {
        has(&response, part);
    }
}

#[tokio::test]
async fn a_failed_call_is_a_503() {
    let closed = server(|_, client: Client| async move { drop(client) }).await;
    let script = r#"function envoy_on_request(handle)
        local headers, body = handle:httpCall("a", {[":method"] = "GET", [":path"] = "/", [":authority"] = "a"}, "", 5000)
        handle:respond({[":status"] = "200"}, headers[":status"] .. body)
    end"#;
    let filter = lua(&json!({"inline_code": script}));
    let case = Case::with(&[filter], &to("a"), closed).await;
    has(&case.get("/").await, "503upstream failure");
}

#[tokio::test]
async fn information_about_the_stream_is_available() {
    let script = r#"
        function envoy_on_request(handle)
            local info, headers = handle:streamInfo(), handle:headers()
            headers:add("x-info", info:protocol() .. " " .. info:routeName() .. " " .. info:requestedServerName())
            headers:add("x-local", info:downstreamLocalAddress() .. info:downstreamDirectLocalAddress())
            headers:add("x-remote", info:downstreamDirectRemoteAddress() .. info:downstreamRemoteAddress())
            headers:add("x-tls", tostring(info:downstreamSslConnection()) .. tostring(handle:connection():ssl()))
            headers:add("x-meta", handle:metadata():get("key") .. tostring(handle:metadata():get("none")))
            for key, value in pairs(handle:metadata()) do headers:add("x-pair", key .. value) end
            headers:add("x-context", handle:filterContext()["number"] + 1 .. handle:filterContext():get("list")[2])
            info:dynamicMetadata():set("lua", "request", {path = headers:get(":path"), list = {1, 2}})
            headers:add("x-base64", handle:base64Escape("abc"))
            headers:add("x-time", #handle:timestampString(EnvoyTimestampResolution.MICROSECOND) - #tostring(handle:timestamp()))
            local _, problem = pcall(handle.importPublicKey, handle, "", 0)
            headers:add("x-refused", tostring(problem))
            handle:logTrace("a") handle:logDebug("a") handle:logInfo("a") handle:logWarn("a") handle:logErr("a")
            handle:logCritical("last message")
        end
        function envoy_on_response(handle)
            local found = handle:streamInfo():dynamicMetadata():get("lua")["request"]
            handle:headers():add("x-dynamic", found.path .. found.list[2])
        end
    "#;
    let context = json!({"number": 1, "list": ["a", "b"]});
    let mut path = route("/", &json!({"source_code": {"inline_string": script}, "filter_context": context}));
    path["metadata"] = json!({"filter_metadata": {"lua": {"key": "value"}}});
    let mut case = Case::with(&[lua(&json!({}))], &json!([path]), echo().await).await;
    let response = case.get("/p").await;
    let local = case.proxy.to_string();
    for part in [
        "x-info: http/1.1 / ",
        &format!("x-local: {local}{local}"),
        "x-remote: 127.0.0.1:",
        "x-tls: nilnil",
        "x-meta: valuenil",
        "x-pair: keyvalue",
        "x-context: 2b",
        "x-base64: ywjj",
        "x-time: 3",
        "does not support importpublickey()",
        "x-dynamic: /p2",
    ] {
        has(&response, part);
    }
    case.program.until("last message").await;
}

#[tokio::test]
async fn properties_of_tls_are_available() {
    let script = r#"function envoy_on_request(handle)
        local tls = handle:streamInfo():downstreamSslConnection()
        local texts = {
            tostring(tls:peerCertificatePresented()), tostring(tls:peerCertificateValidated()),
            handle:streamInfo():requestedServerName(), tls:subjectPeerCertificate(),
            tls:sha256PeerCertificateDigest(), #tls:uriSanPeerCertificate(), #tls:dnsSansPeerCertificate(),
            #tls:uriSanLocalCertificate(), tls:urlEncodedPemEncodedPeerCertificate(),
            handle:connection():ssl() and "ssl" or "plain"
        }
        handle:respond({[":status"] = "200"}, table.concat(texts, ","))
    end"#;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("script.lua");
    std::fs::write(&file, script).unwrap();
    let filter = lua(&json!({"default_source_code": {"filename": file}}));
    let mut listener = listener("one", &[http(&[filter], &to("a"), &json!({}))]);
    listener["filter_chains"][0]["transport_socket"] = files::tls();
    listener["listener_filters"] = json!([{"name": "tls", "typed_config": {
        "@type": "type.googleapis.com/envoy.extensions.filters.listener.tls_inspector.v3.TlsInspector"}}]);
    let clusters = [cluster("a", echo().await, false)];
    let program = Program::start(folder.path(), &bootstrap(&[listener], &clusters)).await;
    let stream = tls::over_tls(program.listener("one").await, "http/1.1").await;
    let mut client = Client::new(stream);
    client.send("GET / HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n").await;
    has(&client.rest().await, "false,false,a,,,0,0,0,,ssl");
}

#[tokio::test]
async fn trailers_of_responses_are_changed() {
    let trailing = server(|_, mut client: Client| async move {
        client.head().await;
        let head = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n";
        client.send(&format!("{head}3\r\nabc\r\n0\r\nx-t: 1\r\n\r\n")).await;
    })
    .await;
    let script = r#"function envoy_on_response(handle)
        local trailers = handle:trailers()
        trailers:replace("x-t", trailers:get("x-t") .. "2")
    end"#;
    let filter = lua(&json!({"default_source_code": {"inline_string": script}}));
    let case = Case::with(&[filter], &to("a"), trailing).await;
    let response = case.get("/").await;
    has(&response, "3\r\nabc\r\n0\r\nx-t: 12\r\n");
}

#[tokio::test]
async fn routes_select_scripts() {
    let mark = |text: &str| json!({"inline_string": format!("function envoy_on_request(handle) handle:headers():add('x-mark', '{text}') end")});
    let config = json!({"default_source_code": mark("default"), "source_codes": {"named": mark("named")}});
    let routes = json!([
        route("/off", &json!({"disabled": true})),
        route("/named", &json!({"name": "named"})),
        route("/unknown", &json!({"name": "unknown"})),
        route("/own", &json!({"source_code": mark("own")})),
        {"match": {"prefix": "/"}, "route": {"cluster": "a"}}
    ]);
    let case = Case::with(&[lua(&config)], &routes, echo().await).await;
    for (path, mark) in [("/named", "named"), ("/own", "own"), ("/", "default")] {
        has(&case.get(path).await, &format!("x-mark: {mark}"));
    }
    for path in ["/off", "/unknown"] {
        let response = case.get(path).await;
        assert!(!response.contains("x-mark"), "{response}");
    }
}

#[tokio::test]
async fn filters_run_in_reverse_order_for_responses() {
    let mark = |text: &str| {
        let script = format!(
            "function envoy_on_request(handle) handle:headers():add('x-order', '{text}') end
             function envoy_on_response(handle) handle:headers():add('x-back', '{text}') end"
        );
        with(lua(&json!({"default_source_code": {"inline_string": script}})), &json!({"name": text}))
    };
    let case = Case::with(&[mark("one"), mark("two")], &to("a"), echo().await).await;
    let response = case.get("/").await;
    let at = |text: &str| response.find(text).unwrap_or_else(|| panic!("no {text} in {response}"));
    assert!(at("x-order: one") < at("x-order: two"));
    assert!(at("x-back: two") < at("x-back: one"));
}

#[tokio::test]
async fn a_failing_script_does_not_stop_the_request() {
    let case = Case::new(
        r#"
        function envoy_on_request(handle)
            handle:headers():add("x-before", "1")
            local path = handle:headers():get(":path")
            if path == "/endless" then while true do end end
            if path == "/memory" then
                local all = {}
                while true do all[#all + 1] = string.rep("x", 10000) .. #all end
            end
            if path == "/yield" then coroutine.yield() end
            if path == "/stolen" then kept:headers() end
            if path == "/keep" then kept = handle return end
            if path == "/split" then handle:headers():add("x-split", "a\r\nx-other: 1") end
            if path == "/length" then handle:headers():replace("transfer-encoding", "chunked") end
            if path == "/recursive" then local function deep() return 1 + deep() end deep() end
            if path == "/calls" then
                while true do pcall(function() handle:body() end) end
            end
            if path ~= "/fine" then error("wrong") end
        end
        "#,
    )
    .await;
    let paths = [
        "/error",
        "/endless",
        "/memory",
        "/keep",
        "/stolen",
        "/yield",
        "/split",
        "/length",
        "/recursive",
        "/calls",
    ];
    for path in paths {
        let response = case.get(path).await;
        has(&response, "http/1.1 200 ");
        has(&response, "x-before: 1");
        assert!(!response.contains("x-other"), "{response}");
        // The next request is served by a state that works.
        has(&case.get("/fine").await, "x-before: 1");
    }
    assert_eq!(case.counter("envoy_http_lua_errors").await, paths.len() as u64 - 1);
}

#[tokio::test]
async fn large_bodies_are_refused() {
    let case = Case::new(
        r#"
        function envoy_on_request(handle) handle:body() end
        function envoy_on_response(handle)
            if handle:headers():get("x-large") then handle:body() end
        end
        "#,
    )
    .await;
    let response = case.post(&"x".repeat((1 << 20) + 1)).await;
    has(&response, "http/1.1 413 ");
    let large = server(|_, mut client: Client| async move {
        client.head().await;
        let body = "x".repeat((1 << 20) + 1);
        let head = format!("HTTP/1.1 200 OK\r\nx-large: 1\r\ncontent-length: {}\r\n\r\n", body.len());
        client.send(&format!("{head}{body}")).await;
    })
    .await;
    let script = "function envoy_on_response(handle) handle:body() end";
    let filters = [lua(&json!({"default_source_code": {"inline_string": script}}))];
    let case = Case::with(&filters, &to("a"), large).await;
    has(&case.get("/").await, "http/1.1 500 ");
}
