use std::sync::LazyLock;

use serde_json::json;
use skysail_xds::envoy::pb::envoy::{
    config::{
        core::v3::TypedExtensionConfig,
        listener::v3::{Filter, FilterChain, Listener, filter},
    },
    extensions::filters::{
        http::local_ratelimit::v3::LocalRateLimit,
        network::http_connection_manager::v3::{HttpConnectionManager, HttpFilter, http_filter},
    },
    service::discovery::v3::DiscoveryResponse,
};

use super::*;
use crate::translate::bootstrap::convert::{Conversion, convert};

/// Returns the message that the JSON form describes, by Envoy's descriptors.
fn described(mut json: serde_json::Value, name: &str) -> Any {
    json["@type"] = format!("type.googleapis.com/{name}").into();
    let response = json!({"resources": [json]}).to_string();
    let response = convert(Conversion::Discovery, response.as_bytes()).unwrap();
    DiscoveryResponse::decode(&*response).unwrap().resources.remove(0)
}

fn wrapped(json: &serde_json::Value, name: &str) -> Any {
    let typed = json!({"type_url": format!("type.googleapis.com/{name}"), "value": json});
    described(typed, "udpa.type.v1.TypedStruct")
}

/// Returns a listener whose only HTTP filter has this configuration.
fn listener(of: Any) -> Listener {
    let filter = HttpFilter {
        name: "f".into(),
        config_type: Some(http_filter::ConfigType::TypedConfig(of)),
        ..Default::default()
    };
    let manager = HttpConnectionManager { http_filters: vec![filter], ..Default::default() };
    let url = "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager";
    let any = Any { type_url: url.to_owned(), value: manager.encode_to_vec() };
    let filter = Filter { name: "m".into(), config_type: Some(filter::ConfigType::TypedConfig(any)) };
    let chain = FilterChain { filters: vec![filter], ..Default::default() };
    Listener { filter_chains: vec![chain], ..Default::default() }
}

fn unwrap(of: Any) -> Result<Listener> {
    let bytes = unwrapped("envoy.config.listener.v3.Listener", &listener(of).encode_to_vec())?;
    Ok(Listener::decode(&*bytes).unwrap())
}

const LIMIT: &str = "envoy.extensions.filters.http.local_ratelimit.v3.LocalRateLimit";

#[test]
fn a_typed_struct_is_the_message_that_its_json_describes() {
    for json in [
        json!({}),
        json!({
            "stat_prefix": "a", "tokenBucket": {"max_tokens": 40, "tokensPerFill": "20", "fill_interval": "1.5s"},
            "filter_enabled": {"default_value": {"numerator": 7, "denominator": "TEN_THOUSAND"}, "runtime_key": "k"},
            "filter_enforced": {"default_value": {"numerator": 7, "denominator": 2}},
            "response_headers_to_add": [
                {"header": {"key": "a", "value": "b"}, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"},
                {"header": {"key": "c", "value": "d"}, "append": false}
            ],
            "status": {"code": "ServiceUnavailable"}
        }),
    ] {
        let expected = LocalRateLimit::decode(&*described(json.clone(), LIMIT).value).unwrap();
        let any = wrapped(&json, LIMIT);
        let wrapped = listener(any.clone()).encode_to_vec();
        assert!(super::super::check("envoy.config.listener.v3.Listener", &wrapped).has_typed_structs);
        let found = unwrap(any).unwrap();
        let Some(filter::ConfigType::TypedConfig(any)) = &found.filter_chains[0].filters[0].config_type
        else {
            panic!("no filter")
        };
        let manager = HttpConnectionManager::decode(&*any.value).unwrap();
        let Some(http_filter::ConfigType::TypedConfig(any)) = &manager.http_filters[0].config_type else {
            panic!("no HTTP filter")
        };
        assert_eq!(any.type_url, format!("type.googleapis.com/{LIMIT}"));
        let found = LocalRateLimit::decode(&*any.value).unwrap();
        assert_eq!(found, expected);
    }
}

#[test]
fn nested_messages_and_maps_are_converted() {
    let name = "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager";
    let json = json!({
        "route_config": {"name": "r", "virtual_hosts": [{
            "name": "v", "domains": ["*"],
            "routes": [{
                "match": {"prefix": "/"}, "direct_response": {"status": 201},
                "typed_per_filter_config": {"x": {"@type": format!("type.googleapis.com/{LIMIT}"), "status": {"code": 503}}}
            }]
        }]},
        "http_filters": [{"name": "r", "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"}}]
    });
    let expected = HttpConnectionManager::decode(&*described(json.clone(), name).value).unwrap();
    let config = TypedExtensionConfig { name: "t".into(), typed_config: Some(wrapped(&json, name)) };
    let mut out = Vec::new();
    structure(*BY_NAME.get(name).unwrap(), &typed(&config), 0, &mut out).unwrap();
    assert_eq!(HttpConnectionManager::decode(&*out).unwrap(), expected);
}

fn typed(config: &TypedExtensionConfig) -> Struct {
    let any = config.typed_config.as_ref().unwrap();
    TypedStruct::from_slice(&any.value).unwrap().value.unwrap()
}

#[test]
fn errors_name_the_field() {
    for (json, expected) in [
        (
            json!({"token_bucket": {"max_tokens": -1}}),
            "value.token_bucket.max_tokens: has the wrong type: -1",
        ),
        (json!({"token_bucket": {"fill_interval": "soon"}}), "fill_interval: \"soon\" is not a duration"),
        (
            json!({"nothing": 1}),
            "value.nothing: envoy.extensions.filters.http.local_ratelimit.v3.LocalRateLimit has no",
        ),
        (json!({"response_headers_to_add": {}}), "value.response_headers_to_add: must be a list"),
        (
            json!({"filter_enabled": {"default_value": {"denominator": "TEN"}}}),
            "denominator: \"TEN\" is not a value",
        ),
    ] {
        let error = unwrap(wrapped(&json, LIMIT)).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
        assert!(error.starts_with("filter_chains"), "{error}");
    }
}

#[test]
fn other_typed_structs_stay_as_they_are() {
    let any = wrapped(&json!({"a": [1, {"b": null}]}), "some.Type");
    assert_eq!(unwrap(any.clone()).unwrap(), listener(any.clone()));
    let bytes = listener(any).encode_to_vec();
    assert!(!super::super::check("envoy.config.listener.v3.Listener", &bytes).has_typed_structs);
}

proptest::proptest! {
    #[test]
    fn damaged_messages_never_panic(at in 0_usize..400, byte: u8) {
        static BYTES: LazyLock<Vec<u8>> = LazyLock::new(|| {
            let any = wrapped(&json!({"token_bucket": {"max_tokens": 1, "fill_interval": "1s"}}), LIMIT);
            listener(any).encode_to_vec()
        });
        let mut bytes = BYTES.clone();
        let length = bytes.len();
        bytes[at % length] = byte;
        let _ = unwrapped("envoy.config.listener.v3.Listener", &bytes);
    }
}
