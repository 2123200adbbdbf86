//! Filters in `TypedStruct`, as EnvoyFilters contain them.

use serde_json::{Value, json};

use crate::{ask, bootstrap, either::Either, files, support::echo};

fn wrapped(kind: &str, value: &Value, package: &str) -> Value {
    json!({"name": kind, "typed_config": {
        "@type": format!("type.googleapis.com/{package}.TypedStruct"),
        "type_url": format!("type.googleapis.com/envoy.extensions.filters.{kind}"),
        "value": value
    }})
}

#[tokio::test]
async fn filters_in_typed_structs_have_their_effect() {
    let all = json!({"default_value": {"numerator": 100, "denominator": "HUNDRED"}, "runtime_key": "x"});
    let limit = json!({
        "stat_prefix": "limit",
        "token_bucket": {"max_tokens": 2, "tokens_per_fill": 1, "fill_interval": "3600s"},
        "filter_enabled": all, "filter_enforced": all,
        "response_headers_to_add": [
            {"header": {"key": "x-limited", "value": "yes"}, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}]
    });
    let limit = wrapped("http.local_ratelimit.v3.LocalRateLimit", &limit, "udpa.type.v1");
    let http = files::http(&[limit], &files::to("c"), &json!({}));
    let tcp = json!({"stat_prefix": "t", "cluster": "c", "idle_timeout": "60s"});
    let tcp = wrapped("network.tcp_proxy.v3.TcpProxy", &tcp, "xds.type.v3");
    let listeners = [files::listener("http", &[http]), files::listener("tcp", &[tcp])];
    let clusters = [files::cluster("c", echo().await, false)];
    for proxy in Either::both(&bootstrap(&listeners, &clusters)).await {
        let address = proxy.listener("http").await;
        for allowed in [true, true, false] {
            let (head, _) = ask(address, "GET / HTTP/1.1\r\nhost: a\r\n\r\n").await;
            let (status, header) = if allowed { ("200", false) } else { ("429", true) };
            assert!(head.starts_with(&format!("HTTP/1.1 {status} ")), "{head}");
            assert_eq!(head.contains("\r\nx-limited: yes\r\n"), header, "{head}");
        }
        let (head, _) = ask(proxy.listener("tcp").await, "GET / HTTP/1.1\r\nhost: a\r\n\r\n").await;
        assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
    }
}
