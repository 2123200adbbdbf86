//! Supported contents of a bootstrap file; unsupported ones are refused by name.

use skysail_xds::Kind;

use super::*;
use crate::discovery::{inventory::Inventory, secrets::Secrets};
use skysail_policy::config::{
    http::{FilterKind, ServerHeader},
    listener::Terminal,
};

/// Bootstrap of a server's sidecar as in comparisons with Envoy: the whole configuration of an Istio sidecar in
/// one file.
const SIDECAR: &str = include_str!("../../../testdata/sidecar.yaml");

fn read(text: &str) -> anyhow::Result<Bootstrap> {
    parse(convert::convert(Conversion::Bootstrap, text.as_bytes())?.into(), false)
}

fn refused(text: &str) -> String {
    let Err(error) = read(text) else { panic!("taken: {text}") };
    format!("{error:#}")
}

#[test]
fn a_static_sidecar_configuration_comes_into_force_at_once() {
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
    assert!(matches!(manager.filters[0].kind, FilterKind::Rbac(_)), "{:?}", manager.filters);
    assert_eq!(manager.access_logs.len(), 1);
    assert_eq!(manager.server, ServerHeader::Overwrite("istio-envoy".into()));
    assert_eq!(snapshot.clusters["up"].endpoints.load().priorities[0].len(), 1);
    assert!(inventory.is_warm(std::time::Instant::now()));
}

#[test]
fn process_limits_are_runtime_keys() {
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
fn misspelt_and_unsupported_fields_are_named_with_their_path() {
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
fn ads_config_is_parsed() {
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

/// A sidecar's bootstrap as Istio's agent wrote it.
const AGENT: &str = include_str!("../../../testdata/agent.json");

#[test]
fn the_bootstrap_of_istios_agent_is_accepted() {
    let file = read(AGENT).unwrap();
    assert_eq!(file.pressure.max_connections, Some(2_147_483_647));
    let mut inventory = Inventory::new(Secrets::new(Default::default()), Default::default());
    for (name, body) in &file.clusters {
        inventory.add_static(Kind::Cluster, name, body).unwrap();
    }
    for (name, body) in &file.listeners {
        inventory.add_static(Kind::Listener, name, body).unwrap();
    }
    inventory.settle(std::time::Instant::now());
    let snapshot = inventory.snapshot();
    let listener = &snapshot.listeners.by_name["0.0.0.0_15090"];
    assert!(listener.bypass_overload && listener.ignore_connection_limit);
    let Terminal::Http(manager) = &listener.chains[0].terminal else { panic!("not HTTP") };
    let codings = manager.filters.iter().map(|filter| {
        let FilterKind::Compress(compressor) = &filter.kind else { panic!("{:?}", manager.filters) };
        assert!(compressor.content_types.iter().any(|media| &**media == "application/openmetrics-text"));
        compressor.coding.name()
    });
    assert_eq!(codings.collect::<Vec<_>>(), ["br", "zstd", "gzip"]);
}

#[test]
fn overload_manager_settings_are_accepted_or_refused_by_name() {
    let manager = |monitor: &str, action: &str| {
        format!("overload_manager: {{resource_monitors: [{monitor}], actions: [{action}]}}")
    };
    let monitor = |kind: &str, config: &str| {
        format!(
            "{{name: m, typed_config: {{\"@type\": type.googleapis.com/envoy.extensions.resource_monitors.{kind}, {config}}}}}"
        )
    };
    let heap = monitor("fixed_heap.v3.FixedHeapConfig", "max_heap_size_bytes: 1000000");
    let scaled = "triggers: [{name: m, scaled: {scaling_threshold: 0.8, saturation_threshold: 0.9}}]";
    let taken = read(&manager(&heap, &format!("{{name: envoy.overload_actions.shrink_heap, {scaled}}}")))
        .unwrap()
        .pressure;
    assert_eq!(taken.monitors[0].resource, crate::overload::pressure::LimitedResource::Heap(1_000_000));
    assert_eq!((taken.actions[0].triggers[0].from, taken.actions[0].triggers[0].to), (0.8, 0.9));
    let cgroup = monitor("cgroup_memory.v3.CgroupMemoryConfig", "max_memory_bytes: 5");
    assert_eq!(read(&manager(&cgroup, "")).unwrap().pressure.monitors.len(), 1);
    for (monitor, action, words) in [
        (
            &heap,
            "{name: envoy.overload_actions.reduce_timeouts, triggers: [{name: m, threshold: {value: 0.9}}]}",
            "no overload action \"envoy.overload_actions.reduce_timeouts\"",
        ),
        (
            &heap,
            "{name: envoy.overload_actions.shrink_heap, triggers: [{name: x, threshold: {value: 0.9}}]}",
            "no resource monitor \"x\"",
        ),
        (
            &heap,
            "{name: envoy.overload_actions.shrink_heap, triggers: [{name: m, threshold: {value: 90}}]}",
            "from 0 to 1",
        ),
        (&heap, "{name: envoy.overload_actions.shrink_heap}", "must not be empty"),
        (&monitor("fixed_heap.v3.FixedHeapConfig", "max_heap_size_bytes: 0"), "", "max_heap_size_bytes"),
        (
            &monitor(
                "downstream_connections.v3.DownstreamConnectionsConfig",
                "max_active_downstream_connections: 0",
            ),
            "",
            "max_active_downstream_connections",
        ),
    ] {
        let message = refused(&manager(monitor, action));
        assert!(message.contains(words), "{message}");
    }
    let message = refused("overload_manager: {loadshed_points: [{name: a}]}");
    assert!(message.contains("loadshed_points"), "{message}");
}
