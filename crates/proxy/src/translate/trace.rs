//! Translates tracing: sampling, tags and the collector of spans.

use std::{sync::Arc, time::Duration};

use skysail_proto::Codec as _;
use skysail_proto::{
    envoy::pb::{
        envoy::{
            config::{
                core::v3::{HttpService, TypedExtensionConfig},
                route::v3::{Decorator as DecoratorProto, Tracing as RouteProto},
                trace::v3::{
                    OpenTelemetryConfig, ZipkinConfig,
                    tracing::{Http, http},
                    zipkin_config::{CollectorEndpointVersion, TraceContextOption},
                },
            },
            extensions::{
                filters::network::http_connection_manager::v3::http_connection_manager::Tracing as Proto,
                request_id::uuid::v3::UuidRequestIdConfig,
                tracers::opentelemetry::resource_detectors::v3::EnvironmentResourceDetectorConfig,
            },
            r#type::{
                metadata::v3::{MetadataKey, metadata_key::path_segment::Segment, metadata_kind},
                tracing::v3::{CustomTag as TagProto, custom_tag},
                v3::{FractionalPercent, Percent, fractional_percent::DenominatorType},
            },
        },
        google::protobuf::Any,
    },
    otlp::{self, InstrumentationScope, KeyValue, Resource, ResourceSpans, ScopeSpans, attribute},
};

use super::{
    At as _, Reject, Result,
    authorization::{self, GrpcTarget},
    collector, flag, jwt, number, text, type_name, unknown_type, unpack, warn_once,
};
use skysail_policy::config::{
    collector::{Call, Collector, Envelope},
    trace::{
        CustomTag, Decorator, Fraction, RequestIdUse, RouteTracing, Sampling, TagValue, TraceProvider,
        Tracer, Tracing, Zipkin,
    },
};

/// Envoy's defaults.
const MAX_PATH: u32 = 256;
const TIMEOUT: Duration = Duration::from_secs(5);

/// Flush interval and maximum size of span batches.
const INTERVAL: Duration = Duration::from_secs(1);
const SIZE: usize = 16 * 1024;

/// Translates a connection manager's tracing; `None` without a usable collector.
pub(super) fn translate(proto: &Proto, strict: bool) -> Result<Option<Tracing>> {
    let Some(provider) = &proto.provider else { return Ok(None) };
    let Some(provider) = self::provider(provider, strict).at("provider")? else { return Ok(None) };
    let sampling = Sampling {
        client: percent(proto.client_sampling.as_ref()),
        random: percent(proto.random_sampling.as_ref()),
        overall: percent(proto.overall_sampling.as_ref()),
    };
    Ok(Some(Tracing {
        sampling,
        tags: tags(&proto.custom_tags)?,
        max_path: number(proto.max_path_tag_length).unwrap_or(MAX_PATH) as usize,
        attempt_spans: flag(proto.spawn_upstream_span).unwrap_or(false),
        propagates: !proto.no_context_propagation,
        provider,
    }))
}

/// Translates a route's tracing.
pub(super) fn route(proto: &RouteProto) -> Result<RouteTracing> {
    let share = |proto: Option<&FractionalPercent>| {
        proto.map_or(Fraction::ALL, |share| Fraction {
            numerator: share.numerator,
            denominator: match share.denominator() {
                DenominatorType::Hundred => 100,
                DenominatorType::TenThousand => 10_000,
                DenominatorType::Million => 1_000_000,
            },
        })
    };
    let sampling = Sampling {
        client: share(proto.client_sampling.as_ref()),
        random: share(proto.random_sampling.as_ref()),
        overall: share(proto.overall_sampling.as_ref()),
    };
    Ok(RouteTracing { sampling, tags: tags(&proto.custom_tags)? })
}

/// Returns the span name that a route sets.
pub(super) fn decorator(proto: &DecoratorProto) -> Option<Decorator> {
    let propagate = flag(proto.propagate).unwrap_or(true);
    (!proto.operation.is_empty()).then(|| Decorator { operation: proto.operation.as_str().into(), propagate })
}

/// Translates the use of `x-request-id` for sampling.
pub(super) fn request_id(any: &Any) -> Result<RequestIdUse> {
    if type_name(any) != "envoy.extensions.request_id.uuid.v3.UuidRequestIdConfig" {
        return Err(unknown_type("request id extension", "", any));
    }
    let proto: UuidRequestIdConfig = unpack(any)?;
    Ok(RequestIdUse {
        pack: flag(proto.pack_trace_reason).unwrap_or(true),
        decides: flag(proto.use_request_id_for_trace_sampling).unwrap_or(true),
    })
}

/// Returns a percentage in hundredths of a percent, as Envoy does.
fn percent(proto: Option<&Percent>) -> Fraction {
    proto.map_or(Fraction::ALL, |percent| Fraction {
        numerator: (percent.value.clamp(0.0, 100.0) * 100.0) as u32,
        denominator: 10_000,
    })
}

fn tags(protos: &[TagProto]) -> Result<Vec<CustomTag>> {
    let mut tags = Vec::with_capacity(protos.len());
    for (index, proto) in protos.iter().enumerate() {
        let value = tag(proto).at(format_args!("custom_tags[{index}]"))?;
        // Tags with empty values are omitted.
        if !matches!(&value, TagValue::Literal(text) if text.is_empty()) {
            tags.push(CustomTag { name: proto.tag.as_str().into(), value });
        }
    }
    Ok(tags)
}

fn tag(proto: &TagProto) -> Result<TagValue> {
    use custom_tag::Type;
    Ok(match proto.r#type.as_ref().ok_or_else(|| Reject::new("must say where its value comes from"))? {
        Type::Literal(literal) => TagValue::Literal(literal.value.as_str().into()),
        Type::Environment(variable) => {
            let value = std::env::var(&variable.name).unwrap_or_else(|_| variable.default_value.clone());
            TagValue::Literal(value.into())
        }
        Type::RequestHeader(header) => {
            TagValue::Header(header.name.to_ascii_lowercase().into(), header.default_value.as_str().into())
        }
        Type::Metadata(metadata) => {
            let kind = metadata.kind.as_ref().and_then(|kind| kind.kind.as_ref());
            let otherwise = metadata.default_value.as_str().into();
            match (kind, &metadata.metadata_key) {
                (None | Some(metadata_kind::Kind::Request(_)), Some(key)) => {
                    TagValue::Metadata(path(key), otherwise)
                }
                _ => TagValue::Literal(otherwise),
            }
        }
        Type::Value(format) => TagValue::Format(text::lenient_format(format).at("value")?),
    })
}

fn path(proto: &MetadataKey) -> Vec<Box<str>> {
    let keys = proto.path.iter().filter_map(|segment| match &segment.segment {
        Some(Segment::Key(key)) => Some(key.as_str().into()),
        _ => None,
    });
    std::iter::once(proto.key.as_str().into()).chain(keys).collect()
}

fn provider(proto: &Http, strict: bool) -> Result<Option<TraceProvider>> {
    let Some(http::ConfigType::TypedConfig(any)) = &proto.config_type else {
        return Err(Reject::new(format!("{:?} has no typed_config", proto.name)));
    };
    let provider = match type_name(any) {
        "envoy.config.trace.v3.OpenTelemetryConfig" => open_telemetry(&unpack(any)?),
        "envoy.config.trace.v3.ZipkinConfig" => zipkin(&unpack(any)?),
        _ => Err(unknown_type("tracer", &proto.name, any)),
    };
    match provider.at("typed_config") {
        // An unusable tracer must not stop traffic.
        Err(reject) if !strict => {
            warn_once(format!("requests are not traced: {reject}"));
            Ok(None)
        }
        provider => provider.map(Some),
    }
}

fn open_telemetry(proto: &OpenTelemetryConfig) -> Result<TraceProvider> {
    let name = if proto.service_name.is_empty() { "unknown_service:skysail" } else { &proto.service_name };
    let version = env!("CARGO_PKG_VERSION");
    let mut attributes = vec![
        attribute("service.name", name),
        attribute("telemetry.sdk.language", "rust"),
        attribute("telemetry.sdk.name", "skysail"),
        attribute("telemetry.sdk.version", version),
    ];
    for (index, detector) in proto.resource_detectors.iter().enumerate() {
        detect(detector, &mut attributes).at(format_args!("resource_detectors[{index}]"))?;
    }
    let resource = ResourceSpans {
        resource: Some(Resource { attributes, ..Resource::default() }),
        ..ResourceSpans::default()
    };
    let scope = InstrumentationScope {
        name: "skysail".to_owned(),
        version: version.to_owned(),
        ..InstrumentationScope::default()
    };
    let scope = ScopeSpans { scope: Some(scope), ..ScopeSpans::default() };
    let envelope = Envelope::Message {
        before: scope.to_vec(),
        // Field numbers of `ResourceSpans.scope_spans` and `ExportTraceServiceRequest.resource_spans`.
        around: vec![(resource.to_vec(), 2), (Vec::new(), 1)],
        first: Vec::new(),
    };
    let collector = match (&proto.grpc_service, &proto.http_service) {
        (Some(service), None) => {
            let GrpcTarget { cluster, authority, metadata, timeout } =
                authorization::grpc(service).at("grpc_service")?;
            let call = Call::Unary(otlp::EXPORT_SPANS);
            collector(cluster, authority, call, metadata, timeout.unwrap_or(TIMEOUT), envelope)
        }
        (None, Some(service)) => post(service, "application/x-protobuf", envelope).at("http_service")?,
        _ => return Err(Reject::new("needs a grpc_service or an http_service, and not both")),
    };
    Ok(TraceProvider { tracer: Tracer::OpenTelemetry, collector: Arc::new(collector) })
}

/// Returns a collector that receives spans by HTTP POST.
fn post(service: &HttpService, content_type: &'static str, envelope: Envelope) -> Result<Collector> {
    let uri = service.http_uri.as_ref().ok_or_else(|| Reject::new("must be given"));
    let uri = uri.and_then(jwt::http_uri).at("http_uri")?;
    let headers = collector::headers(&service.request_headers_to_add).at("request_headers_to_add")?;
    let call = Call::Post { path: uri.path, content_type };
    Ok(collector(uri.cluster, uri.authority, call, headers, uri.timeout, envelope))
}

fn collector(
    cluster: Box<str>,
    authority: Box<str>,
    call: Call,
    headers: Vec<(Box<str>, Box<str>)>,
    timeout: Duration,
    envelope: Envelope,
) -> Collector {
    let (what, interval, size) = ("spans", INTERVAL, SIZE);
    Collector { what, cluster, authority, call, headers, timeout, interval, size, envelope }
}

/// Adds the resource attributes of a detector. As in Envoy, they override configured ones.
fn detect(proto: &TypedExtensionConfig, attributes: &mut Vec<KeyValue>) -> Result<()> {
    let any =
        proto.typed_config.as_ref().ok_or_else(|| Reject::new("must be given").at_field("typed_config"))?;
    if type_name(any)
        != "envoy.extensions.tracers.opentelemetry.resource_detectors.v3.EnvironmentResourceDetectorConfig"
    {
        return Err(unknown_type("resource detector", &proto.name, any));
    }
    let EnvironmentResourceDetectorConfig {} = unpack(any)?;
    let text = std::env::var("OTEL_RESOURCE_ATTRIBUTES").unwrap_or_default();
    for (key, value) in text.split(',').filter_map(|pair| pair.split_once('=')) {
        attributes.retain(|known| known.key != key.trim());
        attributes.push(attribute(key.trim(), value.trim()));
    }
    Ok(())
}

fn zipkin(proto: &ZipkinConfig) -> Result<TraceProvider> {
    match proto.collector_endpoint_version() {
        CollectorEndpointVersion::HttpJson => {}
        other => {
            let reason = format!("{} is not supported: use HTTP_JSON", other.as_str_name());
            return Err(Reject::new(reason).at_field("collector_endpoint_version"));
        }
    }
    const JSON: &str = "application/json";
    let collector = match &proto.collector_service {
        Some(service) => post(service, JSON, Envelope::Array).at("collector_service")?,
        None if proto.collector_cluster.is_empty() => {
            return Err(Reject::new("must be given").at_field("collector_cluster"));
        }
        None => {
            let host = &proto.collector_hostname;
            let authority = if host.is_empty() { &proto.collector_cluster } else { host };
            let call = Call::Post { path: proto.collector_endpoint.as_str().into(), content_type: JSON };
            let cluster = proto.collector_cluster.as_str().into();
            collector(cluster, authority.as_str().into(), call, Vec::new(), TIMEOUT, Envelope::Array)
        }
    };
    let zipkin = Zipkin {
        long_ids: proto.trace_id_128bit,
        timed_ids: proto.timestamp_trace_ids,
        shared: flag(proto.shared_span_context).unwrap_or(true),
        w3c: proto.trace_context_option() == TraceContextOption::UseB3WithW3cPropagation,
    };
    Ok(TraceProvider { tracer: Tracer::Zipkin(zipkin), collector: Arc::new(collector) })
}
