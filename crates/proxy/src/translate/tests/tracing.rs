//! Translation of tracing as istiod configures it; unsupported settings are refused.

use skysail_xds::envoy::pb::envoy::{
    config::{
        core::v3::{
            GrpcService, HttpService, HttpUri, TypedExtensionConfig, grpc_service, http_uri::HttpUpstreamType,
        },
        route::v3::Tracing as RouteTracingProto,
        trace::v3::{OpenTelemetryConfig, ZipkinConfig, tracing},
    },
    extensions::{
        filters::network::http_connection_manager::v3::http_connection_manager::Tracing as Proto,
        tracers::opentelemetry::resource_detectors::v3::EnvironmentResourceDetectorConfig,
    },
    r#type::{
        tracing::v3::{CustomTag, custom_tag},
        v3::{FractionalPercent, Percent, fractional_percent::DenominatorType},
    },
};

use super::*;
use skysail_policy::config::{
    collector::{Call, Envelope},
    trace::{Fraction, Sampling, TagValue, Tracer, Tracing, Zipkin},
};

fn any<M: Message + Name>(message: &M) -> Any {
    Any { type_url: M::type_url(), value: message.encode_to_vec() }
}

fn proto(provider: &impl Name) -> Proto {
    let config_type = Some(tracing::http::ConfigType::TypedConfig(any(provider)));
    Proto {
        random_sampling: Some(Percent { value: 0.1 }),
        provider: Some(tracing::Http { name: "t".to_owned(), config_type }),
        ..Proto::default()
    }
}

fn taken(provider: &impl Name) -> Tracing {
    trace::translate(&proto(provider), true).unwrap().unwrap()
}

fn otlp() -> OpenTelemetryConfig {
    let target = grpc_service::EnvoyGrpc {
        cluster_name: "outbound|4317||c".to_owned(),
        authority: "c".to_owned(),
        ..Default::default()
    };
    let target_specifier = Some(grpc_service::TargetSpecifier::EnvoyGrpc(target));
    OpenTelemetryConfig {
        grpc_service: Some(GrpcService { target_specifier, ..GrpcService::default() }),
        service_name: "productpage.default".to_owned(),
        ..OpenTelemetryConfig::default()
    }
}

fn zipkin() -> ZipkinConfig {
    ZipkinConfig {
        collector_cluster: "outbound|9411||z".to_owned(),
        collector_endpoint: "/api/v2/spans".to_owned(),
        collector_endpoint_version: 1,
        ..ZipkinConfig::default()
    }
}

#[test]
fn the_collector_is_translated() {
    let otlp_by_grpc = taken(&otlp());
    let share = Fraction { numerator: 10, denominator: 10_000 };
    assert_eq!(
        otlp_by_grpc.sampling,
        Sampling { client: Fraction::ALL, random: share, overall: Fraction::ALL }
    );
    assert_eq!((otlp_by_grpc.max_path, otlp_by_grpc.attempt_spans), (256, false));
    assert_eq!(otlp_by_grpc.provider.tracer, Tracer::OpenTelemetry);
    let collector = &otlp_by_grpc.provider.collector;
    assert_eq!((&*collector.cluster, &*collector.authority), ("outbound|4317||c", "c"));
    assert_eq!(collector.call, Call::Unary("/opentelemetry.proto.collector.trace.v1.TraceService/Export"));

    let uri = HttpUri {
        uri: "http://c:4318/v1/traces".to_owned(),
        timeout: Some(DurationProto { seconds: 3, nanos: 0 }),
        http_upstream_type: Some(HttpUpstreamType::Cluster("c".to_owned())),
    };
    let service = HttpService { http_uri: Some(uri), ..HttpService::default() };
    let http_service = Some(service.clone());
    let by_http = taken(&OpenTelemetryConfig { grpc_service: None, http_service, ..otlp() });
    let collector = &by_http.provider.collector;
    let call = Call::Post { path: "/v1/traces".into(), content_type: "application/x-protobuf" };
    assert_eq!((&collector.call, collector.timeout), (&call, Duration::from_secs(3)));

    let tracing = taken(&zipkin());
    let defaults = Zipkin { long_ids: false, timed_ids: false, shared: true, w3c: false };
    assert_eq!(tracing.provider.tracer, Tracer::Zipkin(defaults));
    let collector = &tracing.provider.collector;
    assert_eq!((&*collector.authority, &collector.envelope), ("outbound|9411||z", &Envelope::Array));
    // In istiod's form.
    let by_service =
        ZipkinConfig { collector_cluster: String::new(), collector_service: Some(service), ..zipkin() };
    let collector = taken(&by_service).provider.collector;
    let call = Call::Post { path: "/v1/traces".into(), content_type: "application/json" };
    assert_eq!((&collector.call, &*collector.cluster, &*collector.authority), (&call, "c", "c:4318"));
    // Without a provider there is no tracing.
    assert!(trace::translate(&Proto::default(), true).unwrap().is_none());
}

#[test]
fn detectors_read_the_environment() {
    let environment = any(&EnvironmentResourceDetectorConfig {});
    let detector = TypedExtensionConfig { name: "e".to_owned(), typed_config: Some(environment) };
    let detected = OpenTelemetryConfig { resource_detectors: vec![detector], ..otlp() };
    // Without the variable the detector adds nothing.
    let envelope = |config| taken(config).provider.collector.envelope.clone();
    assert_eq!(envelope(&detected), envelope(&otlp()));
    let unknown = TypedExtensionConfig { name: "d".to_owned(), typed_config: Some(any(&zipkin())) };
    let unknown = OpenTelemetryConfig { resource_detectors: vec![unknown], ..otlp() };
    let reason = trace::translate(&proto(&unknown), true).unwrap_err().to_string();
    assert!(
        reason.starts_with("provider.typed_config.resource_detectors[0]: skysail-proxy has no"),
        "{reason}"
    );
}

#[test]
fn an_unknown_tracer_does_not_stop_traffic() {
    let unknown = CustomTag { tag: "t".to_owned(), r#type: None };
    let grpc_and_http = OpenTelemetryConfig { http_service: Some(HttpService::default()), ..otlp() };
    for (proto, why) in [
        (proto(&unknown), "provider.typed_config: skysail-proxy has no tracer \"t\" of type"),
        (
            proto(&grpc_and_http),
            "provider.typed_config: needs a grpc_service or an http_service, and not both",
        ),
        (
            proto(&ZipkinConfig { collector_endpoint_version: 2, ..zipkin() }),
            "provider.typed_config.collector_endpoint_version: HTTP_PROTO is not supported",
        ),
    ] {
        assert!(trace::translate(&proto, false).unwrap().is_none());
        let reason = trace::translate(&proto, true).unwrap_err().to_string();
        assert!(reason.starts_with(why), "{reason}");
    }
    // An error in a file is only a warning in a control plane's resource.
    let sampler = Some(TypedExtensionConfig::default());
    let body = OpenTelemetryConfig { sampler, ..otlp() }.encode_to_vec();
    with(false, |translator| translator.decode::<OpenTelemetryConfig>(&body)).unwrap();
    let refused = with(true, |translator| translator.decode::<OpenTelemetryConfig>(&body));
    assert!(refused.unwrap_err().to_string().contains("does not support field sampler"));
}

#[test]
fn tags_have_a_source() {
    let tag = |kind| CustomTag { tag: "t".to_owned(), r#type: Some(kind) };
    let variable = |name: &str, default: &str| {
        let (name, default_value) = (name.to_owned(), default.to_owned());
        tag(custom_tag::Type::Environment(custom_tag::Environment { name, default_value }))
    };
    let header = custom_tag::Header { name: "End-User".to_owned(), default_value: "none".to_owned() };
    let custom_tags = vec![
        variable("CARGO_PKG_NAME", ""),
        variable("SKYSAIL_NONE", "unknown"),
        variable("SKYSAIL_NONE", ""),
        tag(custom_tag::Type::RequestHeader(header)),
    ];
    let route = RouteTracingProto {
        random_sampling: Some(FractionalPercent {
            numerator: 5,
            denominator: DenominatorType::TenThousand.into(),
        }),
        custom_tags,
        ..RouteTracingProto::default()
    };
    let route = trace::route(&route).unwrap();
    assert_eq!(route.sampling.random, Fraction { numerator: 5, denominator: 10_000 });
    let [TagValue::Literal(own), TagValue::Literal(default), TagValue::Header(name, otherwise)] =
        &route.tags.iter().map(|tag| &tag.value).collect::<Vec<_>>()[..]
    else {
        unreachable!("{:?}", route.tags)
    };
    assert_eq!((&**own, &**default), ("skysail-proxy", "unknown"));
    assert_eq!((&**name, &**otherwise), ("end-user", "none"));
    let nothing = RouteTracingProto { custom_tags: vec![CustomTag::default()], ..Default::default() };
    let reason = trace::route(&nothing).unwrap_err().to_string();
    assert_eq!(reason, "custom_tags[0]: must say where its value comes from");
}
