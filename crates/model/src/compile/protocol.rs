//! Application protocols of clusters (`HttpProtocolOptions`).

use std::collections::HashMap;

use skysail_xds::envoy::pb::envoy::extensions::upstreams::http::v3::{
    HttpProtocolOptions,
    http_protocol_options::{
        ExplicitHttpConfig, OutlierDetection, UpstreamProtocolOptions, UseDownstreamHttpConfig,
        explicit_http_config::ProtocolConfig,
    },
};

use super::{
    Scope, filters,
    pb::{Any, core, pack, seconds},
    policy::Effective,
    pool, tls,
};
use crate::api::{Protocol, mesh_config::H2UpgradePolicy, proxy_config::SharedHeaders};

/// Idle timeout of the passthrough clusters in seconds.
const PASSTHROUGH_IDLE_SECONDS: i64 = 300;

/// Protocol of a cluster.
#[derive(Clone, Copy)]
pub(super) struct ClusterProtocol {
    protocol: Protocol,
    /// Whether requests of HTTP/1.1 are sent as HTTP/2.
    upgrades: bool,
    /// Whether the server gets the client's protocol if no protocol is declared.
    sniffs: bool,
    headers: SharedHeaders,
}

impl ClusterProtocol {
    pub(super) fn new(scope: &Scope<'_>, protocol: Protocol, effective: &Effective<'_>) -> Self {
        let mesh = scope.world.mesh().h2_upgrade_policy == H2UpgradePolicy::Upgrade;
        let upgrades = protocol == Protocol::Http && pool::upgrades(effective.connection_pool, mesh);
        Self { protocol, upgrades, sniffs: scope.sniffs, headers: scope.headers }
    }

    /// Returns the same for connections to the workload itself, which are not upgraded.
    pub(super) fn without_upgrade(self) -> Self {
        Self { upgrades: false, ..self }
    }

    /// Returns whether requests are sent as HTTP/2 regardless of the client's version. As in Istio, HTTP/1.1 is not
    /// upgraded if the case of header names is preserved.
    fn is_http2(self) -> bool {
        self.protocol.is_http2() || self.upgrades && !self.headers.keeps_case
    }
}

/// Returns the protocol options; none for a cluster that needs only Envoy's default, HTTP/1.1 with default settings.
pub(super) fn options(
    speech: ClusterProtocol,
    effective: &Effective<'_>,
    auto_sni: Option<core::UpstreamHttpProtocolOptions>,
) -> HashMap<String, Any> {
    let common = pool::common_options(effective.connection_pool);
    let use_client = pool::uses_client_protocol(effective.connection_pool);
    let may_be_http = speech.protocol.is_http() || speech.protocol == Protocol::Unknown;
    let keeps_case = speech.headers.keeps_case && may_be_http;
    let errors = effective.outlier_detection.and_then(pool::error_codes);
    let upstream = if speech.is_http2() {
        explicit(ProtocolConfig::Http2ProtocolOptions(pool::http2(effective.connection_pool)))
    } else if (speech.protocol == Protocol::Unknown && speech.sniffs) || use_client {
        UpstreamProtocolOptions::UseDownstreamProtocolConfig(UseDownstreamHttpConfig {
            http_protocol_options: Some(http1(speech.headers)),
            http2_protocol_options: Some(pool::http2(effective.connection_pool)),
            ..Default::default()
        })
    } else if common.is_some() || auto_sni.is_some() || keeps_case || errors.is_some() {
        let headers = if keeps_case { speech.headers } else { SharedHeaders::default() };
        explicit(ProtocolConfig::HttpProtocolOptions(http1(headers)))
    } else {
        return HashMap::new();
    };
    http_options(HttpProtocolOptions {
        common_http_protocol_options: common,
        upstream_http_protocol_options: auto_sni,
        upstream_protocol_options: Some(upstream),
        outlier_detection: errors.map(|matcher| OutlierDetection { error_matcher: Some(matcher) }),
        ..Default::default()
    })
}

fn explicit(config: ProtocolConfig) -> UpstreamProtocolOptions {
    UpstreamProtocolOptions::ExplicitHttpConfig(ExplicitHttpConfig { protocol_config: Some(config) })
}

/// Returns the options of clusters for unknown destinations. `names` sets the names of TLS by the authority of requests.
pub(super) fn passthrough_options(
    headers: SharedHeaders,
    names: Option<core::UpstreamHttpProtocolOptions>,
) -> HashMap<String, Any> {
    http_options(HttpProtocolOptions {
        upstream_http_protocol_options: names,
        common_http_protocol_options: Some(core::HttpProtocolOptions {
            idle_timeout: Some(seconds(PASSTHROUGH_IDLE_SECONDS)),
            ..Default::default()
        }),
        upstream_protocol_options: Some(UpstreamProtocolOptions::UseDownstreamProtocolConfig(
            UseDownstreamHttpConfig {
                http_protocol_options: Some(http1(headers)),
                http2_protocol_options: Some(Default::default()),
                ..Default::default()
            },
        )),
        ..Default::default()
    })
}

/// Returns the settings of HTTP/1.1 connections.
fn http1(headers: SharedHeaders) -> core::Http1ProtocolOptions {
    core::Http1ProtocolOptions {
        header_key_format: headers.keeps_case.then(filters::preserved_case),
        ..Default::default()
    }
}

fn http_options(options: HttpProtocolOptions) -> HashMap<String, Any> {
    HashMap::from([("envoy.extensions.upstreams.http.v3.HttpProtocolOptions".to_owned(), pack(&options))])
}

/// Returns the protocol inside TLS.
pub(super) fn inside_tls(speech: ClusterProtocol) -> tls::UpstreamProtocol {
    if speech.is_http2() {
        tls::UpstreamProtocol::Http2
    } else if speech.protocol.is_http() {
        tls::UpstreamProtocol::Http1
    } else {
        tls::UpstreamProtocol::Other
    }
}
