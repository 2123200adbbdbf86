//! What a bootstrap file may hold, and what is refused by name.

use skysail_xds::Kind;

use super::*;
use crate::{
    config::{
        http::{Does, ServerHeader},
        listener::Terminal,
    },
    discovery::inventory::Inventory,
    secrets::Secrets,
};

/// A server's sidecar as in a comparison with Envoy: everything a sidecar of Istio has, in one file.
const SIDECAR: &str = include_str!("../../testdata/sidecar.yaml");

fn read(text: &str) -> anyhow::Result<Bootstrap> {
    parse(convert::convert(Conversion::Bootstrap, text.as_bytes())?.into())
}

fn refused(text: &str) -> String {
    let Err(error) = read(text) else { panic!("taken: {text}") };
    format!("{error:#}")
}

#[test]
fn a_sidecar_from_a_file_comes_into_force_at_once() {
    let file = read(SIDECAR).unwrap();
    assert_eq!(file.admin, Some("127.0.0.1:15000".parse().unwrap()));
    assert_eq!(file.node.cluster, "a.default");
    let mut inventory = Inventory::new(Secrets::new(Default::default()), Default::default());
    for (name, body) in &file.clusters {
        inventory.add_static(Kind::Cluster, name, body).unwrap();
    }
    for (name, body) in &file.listeners {
        inventory.add_static(Kind::Listener, name, body).unwrap();
    }
    assert!(inventory.settle(std::time::Instant::now()));
    let snapshot = inventory.snapshot();
    let listener = &snapshot.listeners.by_name["l"];
    assert!(listener.bind && listener.inspect_tls.is_some());
    let Terminal::Http(manager) = &listener.chains[0].terminal else { panic!("not HTTP") };
    assert!(matches!(manager.filters[0].does, Does::Authorize(_)), "{:?}", manager.filters);
    assert_eq!(manager.access_logs.len(), 1);
    assert_eq!(manager.server, ServerHeader::Overwrite("istio-envoy".into()));
    assert_eq!(snapshot.clusters["up"].endpoints.load().priorities[0].len(), 1);
    assert!(inventory.is_warm(std::time::Instant::now()));
}

#[test]
fn limits_of_the_process_are_in_the_runtime() {
    let layers = |second: &str| {
        let first = "envoy.reloadable_features.a: false, overload.premature_reset_total_stream_count: 7";
        format!(
            "layered_runtime: {{layers: [{{name: a, static_layer: {{{first}}}}}, {{name: b, static_layer: {{{second}}}}}, {{name: c, admin_layer: {{}}}}]}}"
        )
    };
    let limits = |second: &str| read(&layers(second)).unwrap().limits;
    assert_eq!(limits("").resets, 7);
    let set = limits(
        "overload.premature_reset_total_stream_count: '8', skysail.overload.late_ms: 50, skysail.overload.under_way: 9",
    );
    assert_eq!((set.resets, set.late.as_millis(), set.under_way), (8, 50, 9));
    let nested =
        limits("overload: {premature_reset_total_stream_count: 5}, skysail: {overload: {late_ms: 6}}");
    assert_eq!((nested.resets, nested.late.as_millis()), (5, 6));
    let reason = refused(&layers("skysail.overload.late_ms: -1"));
    assert!(reason.contains("layered_runtime: b: skysail.overload.late_ms"), "{reason}");
    let reason = refused(&layers("skysail.overload.later: 1"));
    assert!(reason.contains("there is no skysail.overload.later"), "{reason}");
}

#[test]
fn misspelt_and_unsupported_fields_are_named_with_their_place() {
    let reason = refused("static_resources:\n  clustres: []\n");
    assert!(reason.starts_with("static_resources") && reason.contains("clustres"), "{reason}");
    let reason = refused("tracing: {http: {name: zipkin}}\n");
    assert!(reason.contains("field tracing of envoy.config.bootstrap.v3.Bootstrap"), "{reason}");
    let reason = refused("static_resources: {listeners: [{name: l, transparent: true}]}\n");
    assert!(reason.starts_with("static_resources.listeners[0].transparent: "), "{reason}");
    let reason = refused("static_resources: {clusters: [{name: c, health_checks: [{}]}]}\n");
    assert!(reason.contains("health_checks"), "{reason}");
    let reason = refused("dynamic_resources: {cds_config: {path_config_source: {path: /x}}}\n");
    assert!(reason.contains("path_config_source"), "{reason}");
    let reason = refused("{\"node\": ");
    assert!(reason.contains("not valid JSON"), "{reason}");
}

#[test]
fn discovery_says_its_form_and_where_it_is() {
    let text = |form: &str| {
        format!(
            "dynamic_resources:\n  cds_config: {{ads: {{}}}}\n  ads_config:\n    api_type: {form}\n    grpc_services: [{{envoy_grpc: {{cluster_name: xds}}}}]\n"
        )
    };
    let ads = read(&text("DELTA_GRPC")).unwrap().ads.unwrap();
    assert!(ads.form == Form::Delta && ads.cluster == "xds" && ads.clusters && !ads.listeners);
    assert!(read(&text("GRPC")).unwrap().ads.unwrap().form == Form::Sotw);
    assert!(refused(&text("REST")).contains("use GRPC or DELTA_GRPC"));
}

#[test]
fn clusters_behind_a_unix_socket_are_only_for_discovery() {
    let address = |address: &str| {
        let text = format!(
            "static_resources: {{clusters: [{{name: c, load_assignment: {{cluster_name: c, endpoints: [{{lb_endpoints: [{{endpoint: {{address: {address}}}}}]}}]}}}}]}}"
        );
        is_pipe(&read(&text).unwrap().clusters[0].1)
    };
    assert!(address("{pipe: {path: /run/x}}"));
    assert!(!address("{socket_address: {address: 127.0.0.1, port_value: 1}}"));
}
