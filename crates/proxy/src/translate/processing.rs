//! Translates external processing. Source: `envoy.extensions.filters.http.ext_proc.v3`.

use std::{sync::Arc, time::Duration};

use skysail_proto::Codec as _;
use skysail_xds::envoy::pb::envoy::{
    config::{common::mutation_rules::v3::HeaderMutationRules, core::v3::GrpcService},
    extensions::filters::http::ext_proc::v3::{
        ExtProcOverrides, ExtProcPerRoute, ExternalProcessor, MetadataOptions, ProcessingMode as ModeProto,
        ext_proc_per_route::Override, external_processor::RouteCacheAction,
        metadata_options::MetadataNamespaces,
    },
    r#type::matcher::v3::RegexMatcher,
};

use super::{
    At as _, Reject, Result,
    authorization::{GrpcTarget, grpc, list, pairs},
    duration, fingerprint, flag,
    route_filters::status_code,
    text,
};
use crate::call;
use skysail_policy::{
    config::{
        processing::{
            Attributes, ExternalProcessing, MutationRules, ProcessingMode, ProcessingOverride, ProcessorData,
            ProcessorService, RouteReselection,
        },
        route::Setting,
    },
    expression::Expression,
};

/// Envoy's default timeout of an answer.
const TIMEOUT: Duration = Duration::from_millis(200);
/// Envoy's default time for the end of the call of an observing processor.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);
/// Envoy's default status after a failure.
const STATUS_ON_ERROR: u16 = 500;

/// Translates the filter.
pub(super) fn translate(proto: &ExternalProcessor) -> Result<ExternalProcessing> {
    let service = proto.grpc_service.as_ref();
    let service = service.ok_or_else(|| Reject::new("must be given").at_field("grpc_service"))?;
    let mode = proto.processing_mode.as_ref();
    let modes = proto
        .allowed_override_modes
        .iter()
        .enumerate()
        .map(|(index, mode)| self::mode(mode).at(format_args!("allowed_override_modes[{index}]")));
    let time =
        |given: Option<_>, field: &str, default| given.map_or(Ok(default), |time| duration(&time).at(field));
    let (forwarded, received) = match &proto.metadata_options {
        Some(options) => namespaces(options).at("metadata_options")?,
        None => (None, None),
    };
    let forward = proto.forward_rules.clone().unwrap_or_default();
    let status = proto.status_on_error.as_ref().map(|status| status.code.cast_unsigned());
    let route = match (proto.disable_clear_route_cache, proto.route_cache_action()) {
        (true, RouteCacheAction::Default) => RouteReselection::Never,
        (true, _) => {
            let reason = "excludes route_cache_action: use only route_cache_action";
            return Err(Reject::new(reason).at_field("disable_clear_route_cache"));
        }
        (false, RouteCacheAction::Default) => RouteReselection::OnRequest,
        (false, RouteCacheAction::Clear) => RouteReselection::Always,
        (false, RouteCacheAction::Retain) => RouteReselection::Never,
    };
    Ok(ExternalProcessing {
        fingerprint: fingerprint(proto.to_vec()),
        service: self::service(service).at("grpc_service")?,
        failure_allowed: proto.failure_mode_allow,
        status_on_error: status.map_or(Ok(STATUS_ON_ERROR), status_code).at("status_on_error")?,
        timeout: time(proto.message_timeout, "message_timeout", TIMEOUT)?,
        max_timeout: time(proto.max_message_timeout, "max_message_timeout", Duration::ZERO)?,
        mode: mode.map_or_else(|| Ok(ProcessingMode::default()), self::mode).at("processing_mode")?,
        allow_override: proto.allow_mode_override,
        allowed_modes: modes.collect::<Result<_>>()?,
        rules: match &proto.mutation_rules {
            Some(rules) => self::rules(rules).at("mutation_rules")?,
            None => MutationRules::default(),
        },
        allowed_headers: list(forward.allowed_headers.as_ref()).at("forward_rules.allowed_headers")?,
        disallowed_headers: list(forward.disallowed_headers.as_ref())
            .at("forward_rules.disallowed_headers")?
            .unwrap_or_default(),
        data: ProcessorData {
            request_attributes: attributes(&proto.request_attributes).at("request_attributes")?,
            response_attributes: attributes(&proto.response_attributes).at("response_attributes")?,
            forwarded: forwarded.unwrap_or_default(),
            received: received.unwrap_or_default(),
        },
        route,
        allow_immediate: !proto.disable_immediate_response,
        observes: match proto.observability_mode {
            true => Some(time(proto.deferred_close_timeout, "deferred_close_timeout", CLOSE_TIMEOUT)?),
            false => None,
        },
    })
}

/// Translates a route's settings.
pub(super) fn setting(proto: &ExtProcPerRoute) -> Result<Setting> {
    match &proto.r#override {
        Some(Override::Disabled(_)) => Ok(Setting::Off),
        Some(Override::Overrides(overrides)) => {
            Ok(Setting::Processing(Arc::new(self::overrides(overrides).at("overrides")?)))
        }
        None => Err(Reject::new("must be `disabled: true` or overrides")),
    }
}

fn overrides(proto: &ExtProcOverrides) -> Result<ProcessingOverride> {
    let (forwarded, received) = match &proto.metadata_options {
        Some(options) => namespaces(options).at("metadata_options")?,
        None => (None, None),
    };
    let own = |names: &[String], field: &str| match names {
        [] => Ok(None),
        names => attributes(names).at(field).map(Some),
    };
    Ok(ProcessingOverride {
        fingerprint: fingerprint(
            ExtProcPerRoute { r#override: Some(Override::Overrides(proto.clone())) }.to_vec(),
        ),
        service: proto.grpc_service.as_ref().map(service).transpose().at("grpc_service")?,
        metadata: pairs(&proto.grpc_initial_metadata),
        mode: proto.processing_mode.as_ref().map(mode).transpose().at("processing_mode")?,
        failure_allowed: flag(proto.failure_mode_allow),
        request_attributes: own(&proto.request_attributes, "request_attributes")?,
        response_attributes: own(&proto.response_attributes, "response_attributes")?,
        forwarded,
        received,
    })
}

fn service(proto: &GrpcService) -> Result<ProcessorService> {
    // The timeout of the service would end the whole stream; Envoy ignores it as well.
    let GrpcTarget { cluster, authority, metadata, .. } = grpc(proto)?;
    Ok(ProcessorService { cluster, authority, metadata })
}

/// Translates a processing mode.
fn mode(proto: &ModeProto) -> Result<ProcessingMode> {
    call::processing::mode(proto)
        .map_err(|unsupported| Reject::new(unsupported.reason).at_field(unsupported.field))
}

fn rules(proto: &HeaderMutationRules) -> Result<MutationRules> {
    let regex =
        |matcher: Option<&RegexMatcher>| matcher.map(|matcher| text::anchored(&matcher.regex)).transpose();
    Ok(MutationRules {
        allow_routing: flag(proto.allow_all_routing).unwrap_or(false),
        allow_envoy: flag(proto.allow_envoy).unwrap_or(false),
        disallow_system: flag(proto.disallow_system).unwrap_or(false),
        disallow_all: flag(proto.disallow_all).unwrap_or(false),
        allowed: regex(proto.allow_expression.as_ref()).at("allow_expression")?,
        disallowed: regex(proto.disallow_expression.as_ref()).at("disallow_expression")?,
        disallowed_is_error: flag(proto.disallow_is_error).unwrap_or(false),
    })
}

/// Translates names of attributes, which are CEL expressions.
fn attributes(names: &[String]) -> Result<Attributes> {
    let compile = |(index, name): (usize, &String)| {
        let compiled = Expression::compile(name).and_then(|expression| match expression.unknown() {
            [] => Ok(expression),
            unknown => Err(format!("attribute {} does not exist", unknown.join(", "))),
        });
        match compiled {
            Ok(expression) => Ok((name.as_str().into(), expression)),
            Err(reason) => Err(Reject::new(reason).at_field(format_args!("[{index}]"))),
        }
    };
    names.iter().enumerate().map(compile).collect::<Result<Vec<_>>>().map(Arc::new)
}

type Namespaces = Option<Vec<Box<str>>>;

/// Returns the namespaces of metadata that the processor gets, and those that it may set.
fn namespaces(proto: &MetadataOptions) -> Result<(Namespaces, Namespaces)> {
    let untyped = |namespaces: &MetadataNamespaces| {
        namespaces.untyped.iter().map(|name| name.as_str().into()).collect()
    };
    Ok((proto.forwarding_namespaces.as_ref().map(untyped), proto.receiving_namespaces.as_ref().map(untyped)))
}
