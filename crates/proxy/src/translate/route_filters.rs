//! Translates `typed_per_filter_config`: overrides of filter settings for tables, virtual hosts and routes.

use std::{collections::HashMap, sync::Arc};

use skysail_xds::envoy::pb::{
    envoy::{
        config::{core::v3::RuntimeFractionalPercent, route::v3::FilterConfig},
        extensions::filters::{
            common::fault::v3::fault_delay::FaultDelaySecifier,
            http::{
                cors::v3::CorsPolicy,
                fault::v3::{HttpFault, fault_abort::ErrorType},
                on_demand::v3::PerRouteConfig,
                rbac::v3::RbacPerRoute,
            },
        },
        r#type::v3::FractionalPercent,
    },
    google::protobuf::Any,
};

use super::{
    At as _, Reject, Result, authorization, compressor, duration, flag, global_limit, jwt, limit, lua,
    mutation, policy, processing, text, type_name, unknown_type, unpack,
};
use skysail_policy::config::route::{Abort, Cors, Fault, Setting};

/// Filter overrides of a route, including those of its virtual host and table.
#[derive(Clone, Default)]
pub(super) struct PerFilter(pub(super) Vec<(Box<str>, Setting)>);

impl PerFilter {
    /// Returns the overrides of `self`, replaced where `configs` has more specific ones. Header mutations are added
    /// instead, and settings of external processing are merged.
    pub(super) fn with(&self, configs: &HashMap<String, Any>) -> Result<Self> {
        let mut settings = self.clone();
        for (name, any) in configs {
            let setting = setting(name, any).at(format_args!("typed_per_filter_config[{name:?}]"))?;
            let known = settings.0.extract_if(.., |(other, _)| **other == **name).last();
            let setting = match (known, setting) {
                // All levels of the route configuration change headers.
                (Some((_, Setting::HeaderMutation(mut lists))), Setting::HeaderMutation(more)) => {
                    lists.extend(more);
                    Setting::HeaderMutation(lists)
                }
                (Some((_, Setting::Processing(less))), Setting::Processing(more)) => {
                    Setting::Processing(Arc::new(more.over(&less)))
                }
                (_, setting) => setting,
            };
            settings.0.push((name.as_str().into(), setting));
        }
        Ok(settings)
    }
}

fn setting(name: &str, any: &Any) -> Result<Setting> {
    Ok(match type_name(any) {
        "envoy.config.route.v3.FilterConfig" => {
            let wrapped: FilterConfig = unpack(any)?;
            match &wrapped.config {
                _ if wrapped.disabled => Setting::Off,
                // As in Envoy, an empty configuration enables the filter with its own.
                Some(config) if config.type_url.is_empty() => Setting::On,
                Some(config) => setting(name, config).at("config")?,
                None => Setting::On,
            }
        }
        "envoy.extensions.filters.http.fault.v3.HTTPFault" => Setting::Fault(Arc::new(fault(&unpack(any)?)?)),
        "envoy.extensions.filters.http.cors.v3.CorsPolicy" => match cors(&unpack(any)?)? {
            Some(cors) => Setting::Cors(Arc::new(cors)),
            None => Setting::Off,
        },
        "envoy.extensions.filters.http.rbac.v3.RBACPerRoute" => match &unpack::<RbacPerRoute>(any)?.rbac {
            Some(rbac) => Setting::Rbac(policy::http(rbac).at("rbac")?),
            None => Setting::Off,
        },
        "envoy.extensions.filters.http.local_ratelimit.v3.LocalRateLimit" => {
            Setting::RateLimit(Arc::new(limit::translate(&unpack(any)?)?))
        }
        "envoy.extensions.filters.http.header_mutation.v3.HeaderMutationPerRoute" => {
            Setting::HeaderMutation(vec![Arc::new(mutation::of_route(&unpack(any)?)?)])
        }
        "envoy.extensions.filters.http.compressor.v3.CompressorPerRoute" => {
            compressor::setting(&unpack(any)?)?
        }
        "envoy.extensions.filters.http.buffer.v3.BufferPerRoute" => mutation::buffer_setting(&unpack(any)?)?,
        "envoy.extensions.filters.http.on_demand.v3.PerRouteConfig" => {
            let PerRouteConfig { .. } = unpack(any)?;
            Setting::On
        }
        "envoy.extensions.filters.http.ratelimit.v3.RateLimitPerRoute" => {
            Setting::GlobalRateLimit(Arc::new(global_limit::setting(&unpack(any)?)?))
        }
        "envoy.extensions.filters.http.ext_authz.v3.ExtAuthzPerRoute" => {
            authorization::setting(&unpack(any)?)?
        }
        "envoy.extensions.filters.http.ext_proc.v3.ExtProcPerRoute" => processing::setting(&unpack(any)?)?,
        "envoy.extensions.filters.http.lua.v3.LuaPerRoute" => lua::setting(&unpack(any)?)?,
        "envoy.extensions.filters.http.jwt_authn.v3.PerRouteConfig" => jwt::setting(&unpack(any)?)?,
        _ => return Err(unknown_type("setting for filter", name, any)),
    })
}

/// Translates fault injection.
pub(super) fn fault(proto: &HttpFault) -> Result<Fault> {
    let share = |percentage: Option<&FractionalPercent>| percentage.map_or(0, text::millionths);
    let delay = match &proto.delay {
        None => None,
        Some(delay) => match &delay.fault_delay_secifier {
            Some(FaultDelaySecifier::FixedDelay(time)) => {
                Some((share(delay.percentage.as_ref()), duration(time).at("delay.fixed_delay")?))
            }
            _ => return Err(Reject::new("must be a fixed_delay").at_field("delay")),
        },
    };
    let abort = match &proto.abort {
        None => None,
        Some(abort) => {
            let answer = match abort.error_type {
                Some(ErrorType::HttpStatus(status)) => {
                    Abort::Http(status_code(status).at("abort.http_status")?)
                }
                Some(ErrorType::GrpcStatus(status)) => Abort::Grpc(status),
                _ => return Err(Reject::new("must be an http_status or a grpc_status").at_field("abort")),
            };
            Some((share(abort.percentage.as_ref()), answer))
        }
    };
    Ok(Fault { delay, abort, headers: text::headers(&proto.headers)? })
}

/// Returns a valid response status.
pub(super) fn status_code(status: u32) -> Result<u16> {
    match u16::try_from(status) {
        Ok(code @ 200..=599) => Ok(code),
        _ => Err(Reject::new(format!("{status} is not a status from 200 to 599"))),
    }
}

/// Translates CORS; `None` if the policy is disabled.
fn cors(proto: &CorsPolicy) -> Result<Option<Cors>> {
    if proto.filter_enabled.as_ref().is_some_and(|enabled| !always(enabled)) {
        let never = proto.filter_enabled.as_ref().and_then(|enabled| enabled.default_value.as_ref());
        if never.is_none_or(|share| share.numerator == 0) {
            return Ok(None);
        }
        return Err(Reject::new("must be 0 or 100 %").at_field("filter_enabled"));
    }
    let filled = |text: &str| (!text.is_empty()).then(|| text.into());
    let origins = proto.allow_origin_string_match.iter().map(text::text);
    Ok(Some(Cors {
        origins: origins.collect::<Result<_>>().at("allow_origin_string_match")?,
        methods: filled(&proto.allow_methods),
        headers: filled(&proto.allow_headers),
        expose: filled(&proto.expose_headers),
        max_age: filled(&proto.max_age),
        credentials: flag(proto.allow_credentials).unwrap_or(false),
        forward_unmatched: flag(proto.forward_not_matching_preflights).unwrap_or(true),
    }))
}

fn always(enabled: &RuntimeFractionalPercent) -> bool {
    enabled.default_value.as_ref().is_some_and(|share| text::millionths(share) == 1_000_000)
}
