//! Traces of an HTTP connection manager: provider, sampling and tags.

use std::collections::BTreeMap;

use skysail_xds::envoy::pb::envoy::{
    config::trace::v3::{
        DatadogConfig, OpenTelemetryConfig, SkyWalkingConfig, ZipkinConfig, tracing, zipkin_config,
    },
    extensions::filters::network::http_connection_manager::v3::http_connection_manager::Tracing,
    r#type::{
        metadata::v3::{MetadataKey, MetadataKind, metadata_key, metadata_kind},
        tracing::v3::{CustomTag, custom_tag},
    },
};

use super::{
    authorizer::grpc_service,
    pb::{Any, boolean, core, duration, pack, seconds, types, uint32},
};
use crate::{
    ProxyView, Role, World,
    api::{
        extension_provider::{
            Datadog, OpenTelemetry, ProviderHeader, SkyWalking, TraceContextOption, Zipkin,
        },
        kube,
        proxy_tracing::{ProxyTracing, SampledShare},
        telemetry,
    },
};

/// Sampling in percent if nothing configures it. Source: Istio's default.
const SAMPLING: f64 = 1.0;
/// Timeout in seconds of a report to Zipkin.
const ZIPKIN_TIMEOUT: i64 = 5;
/// Timeout in seconds of a report over OTLP and HTTP without a setting. Envoy requires one. Source: the default of
/// `OTEL_EXPORTER_OTLP_TIMEOUT`.
const OTLP_TIMEOUT: i64 = 10;
/// Name of the tracer of Zipkin.
const ZIPKIN: &str = "envoy.tracers.zipkin";
/// Path of a Zipkin collector.
const ZIPKIN_PATH: &str = "/api/v2/spans";

/// Settings of traces of one side.
pub(super) struct Spans<'a> {
    pub(super) provider: Option<&'a str>,
    pub(super) is_disabled: bool,
    pub(super) tags: Option<&'a BTreeMap<String, telemetry::CustomTag>>,
    pub(super) sampling: Option<f64>,
    pub(super) uses_request_id: bool,
    pub(super) has_istio_tags: bool,
    pub(super) has_no_propagation: bool,
}

impl<'a> Spans<'a> {
    pub(super) fn new(provider: Option<&'a str>) -> Self {
        Self {
            provider,
            is_disabled: false,
            tags: None,
            sampling: None,
            uses_request_id: true,
            has_istio_tags: true,
            has_no_propagation: false,
        }
    }
}

/// Returns whether spans are reported: not disabled, and to a provider whose service is known.
pub(super) fn can_report(world: &World, spans: &Spans<'_>) -> bool {
    !spans.is_disabled && spans.provider.is_some_and(|name| is_tracer(world, name))
}

fn is_tracer(world: &World, name: &str) -> bool {
    world.provider(name).is_some_and(|provider| {
        let of = &*provider;
        let services = [
            of.opentelemetry.as_ref().map(|config| (&config.service, config.port)),
            of.zipkin.as_ref().map(|config| (&config.service, config.port)),
            of.datadog.as_ref().map(|config| (&config.service, config.port)),
            of.skywalking.as_ref().map(|config| (&config.service, config.port)),
        ];
        let mut services = services.into_iter().flatten();
        services.next().is_some_and(|(service, port)| world.provider_cluster(service, port).is_ok())
    })
}

/// Returns the traces of a connection manager; `None` if there are none. Without settings, the proxy's own
/// configuration names the collector.
pub(super) fn compile(world: &World, view: &ProxyView, spans: Option<&Spans<'_>>) -> Option<Tracing> {
    let default = ProxyTracing::default();
    let of_mesh = world.mesh().default_config.tracing.as_ref();
    let own = view.settings.tracing.as_ref().or(of_mesh).unwrap_or(&default);
    let SampledShare(share) = own.sampling;
    let sampling = if share > 0.0 && share <= 100.0 { share } else { SAMPLING };
    let Some(spans) = spans else {
        let has_istio_tags = own.enable_istio_tags != Some(false);
        let mut tags = if has_istio_tags { istio_tags(world, view) } else { Vec::new() };
        tags.extend(custom_tags(&own.custom_tags));
        let zipkin = world.zipkin_collector().and_then(|of| zipkin(world, &of.ok()?));
        let traces = || Tracing {
            max_path_tag_length: (own.max_path_tag_length != 0)
                .then(|| uint32(own.max_path_tag_length))
                .flatten(),
            provider: zipkin.map(|config| provider_of(ZIPKIN, config)),
            ..sampled(sampling, sorted(tags))
        };
        return world.mesh().enable_tracing.then(traces);
    };
    let provider = world.provider(spans.provider.filter(|_| !spans.is_disabled)?)?;
    let (name, config, max_tag_length, spawns) = if let Some(of) = &provider.opentelemetry {
        ("envoy.tracers.opentelemetry", opentelemetry(world, view, of)?, of.max_tag_length, false)
    } else if let Some(of) = &provider.zipkin {
        (ZIPKIN, zipkin(world, of)?, of.max_tag_length, false)
    } else if let Some(of) = &provider.datadog {
        ("envoy.tracers.datadog", datadog(world, view, of)?, of.max_tag_length, false)
    } else {
        ("envoy.tracers.skywalking", skywalking(world, provider.skywalking.as_ref()?)?, 0, true)
    };
    let mut tags = if spans.has_istio_tags { istio_tags(world, view) } else { Vec::new() };
    tags.extend(custom_tags(spans.tags.unwrap_or(&own.custom_tags)));
    let max_tag_length = if max_tag_length == 0 { own.max_path_tag_length } else { max_tag_length };
    Some(Tracing {
        max_path_tag_length: (max_tag_length != 0).then(|| uint32(max_tag_length)).flatten(),
        provider: Some(provider_of(name, config)),
        spawn_upstream_span: (spawns || view.role == Role::Router).then(|| boolean(true)).flatten(),
        no_context_propagation: spans.has_no_propagation,
        ..sampled(spans.sampling.unwrap_or(sampling), sorted(tags))
    })
}

fn provider_of(name: &str, config: Any) -> tracing::Http {
    tracing::Http { name: name.into(), config_type: Some(tracing::http::ConfigType::TypedConfig(config)) }
}

fn custom_tags(tags: &BTreeMap<String, telemetry::CustomTag>) -> impl Iterator<Item = CustomTag> {
    tags.iter().filter_map(|(name, tag)| custom_tag(name, tag))
}

fn sorted(mut tags: Vec<CustomTag>) -> Vec<CustomTag> {
    tags.sort_by(|a, b| a.tag.cmp(&b.tag));
    tags
}

fn sampled(random: f64, custom_tags: Vec<CustomTag>) -> Tracing {
    let share = |value: f64| Some(types::Percent { value });
    Tracing {
        client_sampling: share(100.0),
        random_sampling: share(random),
        overall_sampling: share(100.0),
        custom_tags,
        ..Default::default()
    }
}

fn opentelemetry(world: &World, view: &ProxyView, config: &OpenTelemetry) -> Option<Any> {
    let (host, cluster) = world.provider_cluster(&config.service, config.port).ok()?;
    let mut made = OpenTelemetryConfig { service_name: service_name(world, view), ..Default::default() };
    match &config.http {
        Some(http) => {
            made.http_service = Some(core::HttpService {
                http_uri: Some(core::HttpUri {
                    uri: format!("{host}/{}", http.path.trim_start_matches('/')),
                    timeout: Some(http.timeout.map_or(seconds(OTLP_TIMEOUT), |timeout| duration(timeout.0))),
                    http_upstream_type: Some(core::http_uri::HttpUpstreamType::Cluster(cluster)),
                }),
                request_headers_to_add: headers(&http.headers),
                ..Default::default()
            });
        }
        None => {
            let grpc = config.grpc.as_ref();
            made.grpc_service = Some(core::GrpcService {
                timeout: grpc.and_then(|grpc| grpc.timeout).map(|timeout| duration(timeout.0)),
                initial_metadata: grpc.map(|grpc| plain_headers(&grpc.initial_metadata)).unwrap_or_default(),
                ..grpc_service(&host, &cluster)
            });
        }
    }
    let detects = config.resource_detectors.as_ref().is_some_and(|detectors| detectors.environment.is_some());
    made.resource_detectors.extend(detects.then(environment_detector));
    Some(pack(&made))
}

/// Returns the name of a proxy in traces.
fn service_name(world: &World, view: &ProxyView) -> String {
    let setting = view.settings.tracing_service_name.or(world.mesh().default_config.tracing_service_name);
    setting.unwrap_or_default().of(&view.labels, &view.canonical_service, &view.namespace)
}

fn datadog(world: &World, view: &ProxyView, config: &Datadog) -> Option<Any> {
    let (host, cluster) = world.provider_cluster(&config.service, config.port).ok()?;
    Some(pack(&DatadogConfig {
        collector_cluster: cluster,
        service_name: service_name(world, view),
        collector_hostname: host,
        ..Default::default()
    }))
}

fn skywalking(world: &World, config: &SkyWalking) -> Option<Any> {
    let (host, cluster) = world.provider_cluster(&config.service, config.port).ok()?;
    let grpc_service = Some(grpc_service(&host, &cluster));
    Some(pack(&SkyWalkingConfig { grpc_service, ..Default::default() }))
}

/// Returns the detector of resource attributes in the proxy's environment.
fn environment_detector() -> core::TypedExtensionConfig {
    const TYPE: &str = "type.googleapis.com/envoy.extensions.tracers.opentelemetry.resource_detectors.v3.EnvironmentResourceDetectorConfig";
    core::TypedExtensionConfig {
        name: "envoy.tracers.opentelemetry.resource_detectors.environment".into(),
        typed_config: Some(Any { type_url: TYPE.into(), value: Vec::new() }),
    }
}

fn zipkin(world: &World, config: &Zipkin) -> Option<Any> {
    let (host, cluster) = world.provider_cluster(&config.service, config.port).ok()?;
    let path = if config.path.is_empty() { ZIPKIN_PATH } else { &config.path };
    let option = match config.trace_context_option {
        TraceContextOption::UseB3 => zipkin_config::TraceContextOption::UseB3,
        TraceContextOption::UseB3WithW3cPropagation => {
            zipkin_config::TraceContextOption::UseB3WithW3cPropagation
        }
    };
    Some(pack(&ZipkinConfig {
        trace_id_128bit: !config.enable_64bit_trace_id,
        shared_span_context: boolean(false),
        collector_endpoint_version: zipkin_config::CollectorEndpointVersion::HttpJson as i32,
        trace_context_option: option as i32,
        collector_service: Some(core::HttpService {
            http_uri: Some(core::HttpUri {
                uri: format!("http://{host}{path}"),
                timeout: Some(config.timeout.map_or(seconds(ZIPKIN_TIMEOUT), |timeout| duration(timeout.0))),
                http_upstream_type: Some(core::http_uri::HttpUpstreamType::Cluster(cluster)),
            }),
            request_headers_to_add: headers(&config.headers),
            ..Default::default()
        }),
        ..Default::default()
    }))
}

fn plain_headers(headers: &[ProviderHeader]) -> Vec<core::HeaderValue> {
    let one = |header: &ProviderHeader| core::HeaderValue {
        key: header.name.clone(),
        value: header.value.clone(),
        ..Default::default()
    };
    headers.iter().map(one).collect()
}

fn headers(headers: &[ProviderHeader]) -> Vec<core::HeaderValueOption> {
    use core::header_value_option::HeaderAppendAction::OverwriteIfExistsOrAdd;
    let option = |header| core::HeaderValueOption {
        header: Some(header),
        append_action: OverwriteIfExistsOrAdd as i32,
        ..Default::default()
    };
    plain_headers(headers).into_iter().map(option).collect()
}

fn custom_tag(name: &str, tag: &telemetry::CustomTag) -> Option<CustomTag> {
    let kind = if let Some(literal) = &tag.literal {
        custom_tag::Type::Literal(custom_tag::Literal { value: literal.value.clone() })
    } else if let Some(of) = &tag.environment {
        let (name, default_value) = (of.name.clone(), of.default_value.clone());
        custom_tag::Type::Environment(custom_tag::Environment { name, default_value })
    } else if let Some(of) = &tag.header {
        let (name, default_value) = (of.name.clone(), of.default_value.clone());
        custom_tag::Type::RequestHeader(custom_tag::Header { name, default_value })
    } else {
        custom_tag::Type::Value(tag.formatter.as_ref()?.value.clone())
    };
    Some(CustomTag { tag: name.to_owned(), r#type: Some(kind) })
}

/// Returns the tags that all spans of Istio's proxies have.
fn istio_tags(world: &World, view: &ProxyView) -> Vec<CustomTag> {
    let dry_run = [
        ("istio.authorization.dry_run.allow_policy.name", "istio_dry_run_allow_shadow_effective_policy_id"),
        ("istio.authorization.dry_run.allow_policy.result", "istio_dry_run_allow_shadow_engine_result"),
        ("istio.authorization.dry_run.deny_policy.name", "istio_dry_run_deny_shadow_effective_policy_id"),
        ("istio.authorization.dry_run.deny_policy.result", "istio_dry_run_deny_shadow_engine_result"),
    ];
    let mut tags: Vec<CustomTag> = dry_run.iter().map(|(tag, key)| metadata_tag(tag, key)).collect();
    let own = [
        ("istio.canonical_revision", kube::canonical_revision(&view.labels)),
        ("istio.canonical_service", &view.canonical_service),
        ("istio.cluster_id", &view.cluster_id),
        ("istio.mesh_id", world.mesh().mesh_id()),
        ("istio.namespace", &view.namespace),
    ];
    tags.extend(own.iter().filter(|(_, value)| !value.is_empty()).map(|(tag, value)| CustomTag {
        tag: (*tag).to_owned(),
        r#type: Some(custom_tag::Type::Literal(custom_tag::Literal { value: (*value).to_owned() })),
    }));
    tags
}

fn metadata_tag(tag: &str, key: &str) -> CustomTag {
    let segment = metadata_key::path_segment::Segment::Key(key.to_owned());
    CustomTag {
        tag: tag.to_owned(),
        r#type: Some(custom_tag::Type::Metadata(custom_tag::Metadata {
            kind: Some(MetadataKind { kind: Some(metadata_kind::Kind::Request(metadata_kind::Request {})) }),
            metadata_key: Some(MetadataKey {
                key: "envoy.filters.http.rbac".into(),
                path: vec![metadata_key::PathSegment { segment: Some(segment) }],
            }),
            ..Default::default()
        })),
    }
}
