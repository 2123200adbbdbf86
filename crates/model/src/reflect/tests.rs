//! Tests of descriptors, conversion, merge and encoding.

use prost::Message as _;
use prost_reflect::{DescriptorPool, DynamicMessage};
use serde_json::{Value as Json, json};
use skysail_xds::envoy::pb::envoy::{
    config::{
        cluster::v3::Cluster,
        route::v3::{Route, route::Action},
    },
    extensions::filters::network::http_connection_manager::v3::HttpConnectionManager,
};

use super::*;

const CLUSTER: &str = "envoy.config.cluster.v3.Cluster";
const FILTER: &str = "envoy.config.listener.v3.Filter";
const MANAGER: &str =
    "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager";

fn make(name: &str, value: Json) -> DynamicMessage {
    from_json(&descriptor(name).unwrap(), &value).unwrap().message
}

fn refused(name: &str, value: Json) -> (String, String, String) {
    let TypeMismatch { field, message, remedy } = from_json(&descriptor(name).unwrap(), &value).unwrap_err();
    (field, message, remedy)
}

#[test]
fn the_descriptors_are_complete() {
    let bytes: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));
    let pool = DescriptorPool::decode(bytes).unwrap();
    assert!(pool.all_messages().len() > 1_000);
    for name in ["stats.PluginConfig", "udpa.type.v1.TypedStruct", "xds.type.v3.TypedStruct"] {
        assert!(descriptor(name).is_some(), "{name}");
    }
}

#[test]
fn values_become_messages() {
    let value = json!({
        "name": "c", "type": "STRICT_DNS", "connect_timeout": "2.5s",
        "perConnectionBufferLimitBytes": 16384,
        "circuit_breakers": {"thresholds": [{"max_retries": 9}]},
        "metadata": {"filter_metadata": {"a": {"b": [1, "c", null]}}},
        "dns_lookup_family": null, "cleanup_interval": "1m500ms",
    });
    let cluster = Cluster::decode(encode(&make(CLUSTER, value)).as_slice()).unwrap();
    assert_eq!(cluster.name, "c");
    assert_eq!(cluster.connect_timeout.unwrap().nanos, 500_000_000);
    assert_eq!(cluster.per_connection_buffer_limit_bytes.unwrap().value, 16_384);
    assert_eq!(cluster.circuit_breakers.unwrap().thresholds[0].max_retries.unwrap().value, 9);
    assert!(cluster.metadata.unwrap().filter_metadata.contains_key("a"));
    assert_eq!(cluster.dns_lookup_family, 0);
    let rate = cluster.cleanup_interval.unwrap();
    assert_eq!((rate.seconds, rate.nanos), (60, 500_000_000));
}

#[test]
fn unknown_fields_are_named_and_left_out() {
    let any = json!({"@type": "type.googleapis.com/envoy.config.cluster.v3.Cluster", "naem": "x"});
    let value = json!({"conect_timeout": "1s", "name": "c", "cluster_type": {"typed_config": any}});
    let made = from_json(&descriptor(CLUSTER).unwrap(), &value).unwrap();
    assert_eq!(Cluster::decode(encode(&made.message).as_slice()).unwrap().name, "c");
    let found: Vec<_> = made.unknown.iter().map(|of| (of.field.as_str(), of.remedy.as_str())).collect();
    let expected = [
        ("cluster_type.typed_config.naem", "did you mean name?"),
        ("conect_timeout", "did you mean connect_timeout?"),
    ];
    assert_eq!(found, expected);
    assert_eq!(made.unknown[1].message, "envoy.config.cluster.v3.Cluster has no field \"conect_timeout\"");
    let many: Json = (0..100).map(|index| (format!("x{index}"), json!(1))).collect();
    assert_eq!(from_json(&descriptor(CLUSTER).unwrap(), &many).unwrap().unknown.len(), 20);
}

#[test]
fn errors_name_the_field() {
    let nested = json!({"circuit_breakers": {"thresholds": [{}, {"max_retries": "many"}]}});
    assert_eq!(refused(CLUSTER, nested).0, "circuit_breakers.thresholds[1].max_retries");
    assert_eq!(refused(CLUSTER, json!({"name": 3})).0, "name");
    assert_eq!(refused(CLUSTER, json!({"type": "STATICK"})).0, "type");
    assert_eq!(refused(CLUSTER, json!({"connect_timeout": "soon"})).0, "connect_timeout");
    assert_eq!(refused(CLUSTER, json!({"circuit_breakers": []})).0, "circuit_breakers");

    let both = json!({"type": "STATIC", "cluster_type": {"name": "x"}});
    let (field, message, _) = refused(CLUSTER, both);
    assert!(field == "type" || field == "cluster_type", "{field}");
    assert!(message.starts_with("is not allowed together with"), "{message}");
}

#[test]
fn packed_messages_are_checked_too() {
    let any = |content: Json| json!({"name": "f", "typed_config": content});
    assert_eq!(refused(FILTER, any(json!({"stat_prefix": "x"}))).0, "typed_config");
    let unknown = refused(FILTER, any(json!({"@type": "type.googleapis.com/envoy.config.Nothing"})));
    assert_eq!(unknown.0, "typed_config[@type]");
    let old = "type.googleapis.com/envoy.config.filter.http.lua.v2.Lua";
    assert!(refused(FILTER, any(json!({"@type": old}))).2.contains("version 3"));
    let field = any(json!({"@type": MANAGER, "stat_prefix": 1}));
    assert_eq!(refused(FILTER, field).0, "typed_config.stat_prefix");
    let known = any(json!({"@type": "type.googleapis.com/google.protobuf.Struct", "value": {"a": 1}}));
    assert_eq!(text(child(&make(FILTER, known), "typed_config").unwrap(), "type_url"), {
        "type.googleapis.com/google.protobuf.Struct"
    });
}

#[test]
fn scalars_override_messages_merge_lists_append() {
    let mut cluster = make(
        CLUSTER,
        json!({
            "name": "c", "connect_timeout": "9.5s", "type": "EDS",
            "circuit_breakers": {"thresholds": [{"max_retries": 1}]},
            "metadata": {"filter_metadata": {"a": {"x": 1}, "b": {}}},
        }),
    );
    let patch = json!({
        "connect_timeout": "4s",
        "cluster_type": {"name": "other"},
        "circuit_breakers": {"thresholds": [{"max_retries": 2}]},
        "metadata": {"filter_metadata": {"a": {"y": 1}}},
    });
    let patch = make(CLUSTER, patch);
    let mut replaced = cluster.clone();
    merge(&mut cluster, &patch, Lists::Append);
    let merged = Cluster::decode(encode(&cluster).as_slice()).unwrap();
    assert_eq!(merged.name, "c");
    // A duration is replaced as a whole.
    assert_eq!(merged.connect_timeout.unwrap().nanos, 0);
    assert_eq!(merged.circuit_breakers.unwrap().thresholds.len(), 2);
    let metadata = merged.metadata.unwrap().filter_metadata;
    assert!(metadata.contains_key("b") && !metadata["a"].fields.contains_key("x"));
    // One member of a oneof replaces the other.
    assert!(matches!(
        merged.cluster_discovery_type,
        Some(skysail_xds::envoy::pb::envoy::config::cluster::v3::cluster::ClusterDiscoveryType::ClusterType(
            _
        ))
    ));

    merge(&mut replaced, &patch, Lists::Replace);
    let replaced = Cluster::decode(encode(&replaced).as_slice()).unwrap();
    let thresholds = replaced.circuit_breakers.unwrap().thresholds;
    assert_eq!(thresholds.len(), 1);
    assert_eq!(thresholds[0].max_retries.unwrap().value, 2);
}

#[test]
fn packed_messages_merge_if_their_types_are_equal() {
    let filter = |content: Json| make(FILTER, json!({"name": "f", "typed_config": content}));
    let mut to = filter(json!({"@type": MANAGER, "stat_prefix": "a", "xff_num_trusted_hops": 1}));
    let from = filter(json!({"@type": MANAGER, "stat_prefix": "b", "max_request_headers_kb": 48}));
    let to = child_mut(&mut to, "typed_config").unwrap();
    merge_any(to, child(&from, "typed_config").unwrap()).unwrap();
    let manager = HttpConnectionManager::decode(encode(&unpack(to).unwrap()).as_slice()).unwrap();
    assert_eq!((manager.stat_prefix.as_str(), manager.xff_num_trusted_hops), ("b", 1));
    assert_eq!(manager.max_request_headers_kb.unwrap().value, 48);

    let other = filter(
        json!({"@type": "type.googleapis.com/envoy.extensions.filters.network.tcp_proxy.v3.TcpProxy"}),
    );
    let before = to.clone();
    assert!(merge_any(to, child(&other, "typed_config").unwrap()).unwrap_err().contains("cannot be merged"));
    assert_eq!(*to, before);
}

#[test]
fn members_of_a_oneof_are_last_and_the_message_is_equal() {
    let value = json!({
        "match": {"prefix": "/", "case_sensitive": true},
        "direct_response": {"status": 204},
        "name": "r",
        "typed_per_filter_config": {
            "b": {"@type": "type.googleapis.com/google.protobuf.Empty"},
            "a": {"@type": "type.googleapis.com/google.protobuf.Empty"},
        },
    });
    let message = make("envoy.config.route.v3.Route", value);
    let body = encode(&message);
    assert_eq!(body, encode(&message));
    let route = Route::decode(body.as_slice()).unwrap();
    assert!(matches!(route.action, Some(Action::DirectResponse(_))));
    assert_eq!(encode(&DynamicMessage::decode(message.descriptor(), body.as_slice()).unwrap()), body);
    // direct_response (7) is behind name (14).
    assert_eq!(body[body.len() - 5..], [0x3a, 3, 0x08, 0xcc, 0x01]);
}
