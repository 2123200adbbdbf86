//! Listeners with Lua scripts.

use fastrand::Rng;
use serde_json::{Value, json};

use crate::{
    listener::{access_log, address},
    random::{one, rarely},
    request::{Body, Request, Version},
    requests,
};

/// Scripts that do the same in Envoy and here. Differences are in `docs/lua.md`.
const SCRIPTS: [&str; 9] = [
    // Fields of requests.
    r#"
    function envoy_on_request(handle)
        local headers = handle:headers()
        headers:add("x-a", "added")
        headers:add("x-count", headers:getNumValues("x-a") .. (headers:getAtIndex("x-a", 1) or "nil"))
        headers:add("x-got", (headers:get("x-a") or "nil") .. (headers:get("x-none") or "nil"))
        headers:replace("x-b", "replaced")
        headers:remove("x-c")
        headers:add("x-pseudo", headers:get(":method") .. headers:get(":path") .. headers:get(":authority"))
        local names = {}
        for key, value in pairs(headers) do
            if key:sub(1, 2) == "x-" and #key == 3 then names[#names + 1] = key .. "=" .. value end
        end
        table.sort(names)
        headers:add("x-names", table.concat(names, "|"))
    end
    "#,
    // Fields of responses, also of local replies.
    r#"
    function envoy_on_response(handle)
        local headers = handle:headers()
        headers:add("x-status", headers:get(":status"))
        headers:replace("x-b", "replaced")
        headers:remove("content-type")
        if headers:get(":status") == "503" then headers:replace(":status", "599") end
    end
    "#,
    // Bodies of requests.
    r#"
    function envoy_on_request(handle)
        local body = handle:body()
        if body == nil then
            handle:headers():add("x-body", "nil")
        else
            handle:headers():add("x-body", body:length() .. body:getBytes(0, math.min(3, body:length())))
            handle:headers():add("x-range", (pcall(body.getBytes, body, 0, body:length() + 1) and "in" or "out"))
            body:setBytes("new " .. body:getBytes(0, body:length()))
        end
    end
    "#,
    // Bodies of responses.
    r#"
    function envoy_on_response(handle)
        local body = handle:body()
        handle:headers():add("x-body", body == nil and "nil" or "some")
        if body ~= nil and handle:headers():get(":status") == "200" then body:setBytes("replaced") end
    end
    "#,
    // Answers of scripts.
    r#"
    function envoy_on_request(handle)
        if handle:headers():get(":path"):find("b", 1, true) then
            handle:respond({[":status"] = "201", ["content-type"] = "text/html"}, "<p>")
        end
        if handle:headers():get(":path"):find("a", 1, true) then
            handle:respond({[":status"] = "403", ["x-who"] = {"one", "two"}, ["x-b"] = "1"}, "nope")
        end
        handle:headers():add("x-passed", "1")
    end
    function envoy_on_response(handle)
        handle:headers():add("x-seen", handle:headers():get(":status"))
    end
    "#,
    // Errors.
    r#"
    function envoy_on_request(handle)
        handle:headers():add("x-before", "1")
        if handle:headers():get("x-a") then error("wrong") end
        if handle:headers():get("x-b") then handle:respond({[":status"] = "99"}, "") end
        if handle:headers():get("x-c") then local nothing = nil; nothing.field = 1 end
        handle:headers():add("x-after", "1")
    end
    function envoy_on_response(handle)
        handle:headers():add("x-response", "1")
        handle:respond({[":status"] = "200"}, "")
    end
    "#,
    // Another route.
    r#"
    function envoy_on_request(handle)
        if handle:headers():get("x-a") then handle:headers():replace(":path", "/three") end
        if handle:headers():get("x-b") then handle:headers():replace(":path", "/direct") end
    end
    "#,
    // Information.
    r#"
    function envoy_on_request(handle)
        local info, headers = handle:streamInfo(), handle:headers()
        headers:add("x-info", info:protocol() .. info:routeName() .. info:requestedServerName())
        headers:add("x-tls", (handle:connection():ssl() == nil and "plain" or "tls"))
        headers:add("x-meta", (handle:metadata():get("key") or "nil") .. (handle:metadata():get("none") or "nil"))
        headers:add("x-number", handle:metadata():get("number") + 1 .. "")
        headers:add("x-context", (handle:filterContext():get("key") or "nil"))
        headers:add("x-base64", handle:base64Escape("a\0b"))
        info:dynamicMetadata():set("a", "b", {list = {1, 2, "x"}, flag = true, text = "t", number = 1.5})
    end
    function envoy_on_response(handle)
        local found = handle:streamInfo():dynamicMetadata():get("a")
        if found == nil then return end
        local value = found["b"]
        handle:headers():add("x-dynamic", value.list[2] .. value.list[3] .. tostring(value.flag) .. value.number)
    end
    "#,
    // What LuaJIT has in common with Luau.
    r#"
    total = total or 0
    function envoy_on_request(handle)
        local texts = {tostring(6 / 2), 7 / 2, 10 % 3, 2 ^ 10, 1e100, -0.5, #"abc", 0x10}
        texts[#texts + 1] = string.format("%5.2f|%d|%s|%q|%x", 1 / 3, 42, "s", "a\nb", 255)
        texts[#texts + 1] = ("a,b,c"):gsub(",", ";") .. ("key=value"):match("(%w+)=(%w+)") .. ("%d"):rep(2)
        texts[#texts + 1] = tostring(tonumber("0x1f")) .. tostring(tonumber("z", 36)) .. tostring(tonumber("no"))
        texts[#texts + 1] = select('#', unpack({1, 2, 3})) .. type(nil) .. tostring(nil == false) .. math.floor(-1.5)
        texts[#texts + 1] = bit.band(255, 15) .. bit.bor(1, 6) .. bit.bxor(5, 1) .. bit.bnot(0) .. bit.lshift(1, 31)
        texts[#texts + 1] = bit.tohex(48879) .. bit.rshift(-1, 28) .. bit.arshift(-16, 2) .. bit.tobit(4294967295)
        local ok, problem = pcall(function() error({code = 7}) end)
        texts[#texts + 1] = tostring(ok) .. problem.code
        ok, problem = pcall(error, "text", 0)
        texts[#texts + 1] = problem
        for word in ("one two"):gmatch("%a+") do texts[#texts + 1] = word end
        local list = setmetatable({}, {__index = function(_, key) return key .. "!" end, __call = function(_, a) return a end})
        texts[#texts + 1] = list.missing .. list("called")
        local value = string.gsub(table.concat(texts, " "), "[^%g ]", "?")
        handle:headers():add("x-texts", value)
    end
    "#,
];

/// Returns a request that reaches the filters, without trailers: Envoy's scripts also see responses to requests that the
/// proxy refuses, and Envoy drops trailers after a change of the body in HTTP/1.
pub(crate) fn request(rng: &mut Rng) -> Request {
    loop {
        let request = requests::request(rng);
        let has_trailers = matches!(&request.body, Body::Pieces(_, trailers) if !trailers.is_empty());
        let serve =
            request.fields.iter().find(|(name, _)| name == "x-serve").map(|(_, value)| value.as_str());
        let answers_trailers = matches!(serve, Some("trailers" | "grpc-late"));
        if request.path.starts_with('/')
            && request.version != Version::Http10
            && !has_trailers
            && !answers_trailers
        {
            return request;
        }
    }
}

pub(crate) fn listener(rng: &mut Rng, number: usize) -> Value {
    let config = json!({
        "@type": "type.googleapis.com/envoy.extensions.filters.http.lua.v3.Lua",
        "default_source_code": {"inline_string": SCRIPTS[number % SCRIPTS.len()]},
        "clear_route_cache": !rarely(rng, 4),
    });
    let mut filters = vec![json!({"name": "lua", "typed_config": config})];
    if rarely(rng, 3) {
        // A filter that answers some requests, before or after the script.
        let abort = json!({
            "@type": "type.googleapis.com/envoy.extensions.filters.http.fault.v3.HTTPFault",
            "abort": {"http_status": 503, "percentage": {"numerator": 100}},
            "headers": [{"name": "x-d", "present_match": true}],
        });
        filters.insert(rng.usize(..2), json!({"name": "fault", "typed_config": abort}));
    }
    filters.push(json!({"name": "router", "typed_config": {
        "@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"}}));
    let cluster = one(rng, &["one", "three"]);
    let metadata = json!({"filter_metadata": {"lua": {"key": "value", "number": 1}}});
    let context = json!({
        "@type": "type.googleapis.com/envoy.extensions.filters.http.lua.v3.LuaPerRoute",
        "filter_context": {"key": "context"},
    });
    let routes = json!([
        {"name": "three", "match": {"path": "/three"}, "route": {"cluster": "three"}},
        {"match": {"path": "/direct"}, "direct_response": {"status": 202, "body": {"inline_string": "direct"}}},
        {"name": "rest", "match": {"prefix": "/"}, "route": {"cluster": cluster}, "metadata": metadata,
         "typed_per_filter_config": {"lua": context}}
    ]);
    let manager = json!({
        "@type": "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "a",
        "generate_request_id": false,
        "server_name": "twin",
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": routes}]},
        "http_filters": filters,
        "http_protocol_options": {"enable_trailers": true},
        "delayed_close_timeout": "0.01s",
        "access_log": access_log(),
    });
    json!({
        "name": format!("listener-{number}"),
        "address": address(),
        "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}],
    })
}
