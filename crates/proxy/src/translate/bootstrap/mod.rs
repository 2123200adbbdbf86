//! Envoy bootstrap files: the supported settings; unsupported ones are refused.

pub(crate) mod convert;
mod overload;
pub(crate) mod runtime;

use std::{net::SocketAddr, path::PathBuf};

use anyhow::{Context as _, bail};
use bytes::Bytes;
use skysail_proto::Codec as _;
use skysail_xds::{
    client::Form,
    envoy::pb::envoy::{
        config::{
            bootstrap::v3::Bootstrap as Proto,
            core::v3::{
                ApiConfigSource, ConfigSource, Node, api_config_source::ApiType,
                config_source::ConfigSourceSpecifier, grpc_service::TargetSpecifier,
            },
        },
        extensions::transport_sockets::tls::v3::Secret,
    },
};

use self::convert::Conversion;
use crate::{
    overload::{Limits, pressure},
    translate::{self, TlsContexts, Translator},
};

/// Contents of a bootstrap file.
pub(crate) struct Bootstrap {
    /// Encoded, for the config dump.
    pub(crate) body: Bytes,
    /// The sidecar's node.
    pub(crate) node: Node,
    /// Static listeners: name and encoded resource.
    pub(crate) listeners: Vec<(String, Bytes)>,
    /// Static clusters: name and encoded resource.
    pub(crate) clusters: Vec<(String, Bytes)>,
    /// Static secrets, which contexts name without a source.
    pub(crate) secrets: Vec<Secret>,
    /// Discovery settings.
    pub(crate) ads: Option<Ads>,
    /// Address of the admin page.
    pub(crate) admin: Option<SocketAddr>,
    /// Limits of each worker.
    pub(crate) limits: Limits,
    /// Overload settings of the process.
    pub(crate) pressure: pressure::Settings,
}

/// Discovery settings.
pub(crate) struct Ads {
    /// Static cluster of the server.
    pub(crate) cluster: String,
    pub(crate) form: Form,
    /// Whether clusters and listeners are received by discovery.
    pub(crate) clusters: bool,
    pub(crate) listeners: bool,
    /// Initial metadata of the stream.
    pub(crate) metadata: Vec<(String, String)>,
}

/// Bootstrap file to read, with options.
#[derive(Clone, Debug, Default)]
pub(crate) struct Source {
    /// Path of the file.
    pub(crate) path: PathBuf,
    /// Bootstrap in YAML or JSON that is merged into the file's.
    pub(crate) merged: Option<String>,
    /// Warn about fields that are known but not supported, instead of refusing them.
    pub(crate) lenient: bool,
}

/// Reads a bootstrap file; a child process converts it.
pub(crate) fn load(source: &Source) -> anyhow::Result<Bootstrap> {
    let path = source.path.display();
    let text = std::fs::read(&source.path).with_context(|| format!("cannot read {path}"))?;
    let mut body = convert::convert_in_child(Conversion::Bootstrap, text)
        .with_context(|| format!("{path} cannot be used"))?;
    if let Some(merged) = &source.merged {
        // Concatenating encoded messages merges them (protobuf encoding).
        body.extend(
            convert::convert_in_child(Conversion::Bootstrap, merged.as_bytes().to_vec())
                .context("--config-yaml cannot be used")?,
        );
    }
    parse(body.into(), source.lenient).with_context(|| format!("{path} cannot be used"))
}

/// Parses an encoded bootstrap. An unsupported field is an error; with `lenient`, a known one is a warning.
pub(crate) fn parse(body: Bytes, lenient: bool) -> anyhow::Result<Bootstrap> {
    let tls = TlsContexts::default();
    let proto: Proto = Translator { tls: &tls, node: &Node::default(), strict: !lenient }.decode(&body)?;
    let resources = proto.static_resources.unwrap_or_default();
    let admin = match proto.admin.as_ref().and_then(|admin| admin.address.as_ref()) {
        Some(address) => Some(translate::ip_and_port(address).context("admin.address")?),
        None => None,
    };
    let ads = match proto.dynamic_resources {
        None => None,
        Some(dynamic) => {
            let clusters = is_ads(dynamic.cds_config.as_ref()).context("dynamic_resources.cds_config")?;
            let listeners = is_ads(dynamic.lds_config.as_ref()).context("dynamic_resources.lds_config")?;
            let source = dynamic.ads_config.as_ref();
            source
                .map(|source| ads(source, clusters, listeners))
                .transpose()
                .context("dynamic_resources.ads_config")?
        }
    };
    let pressure = proto.overload_manager.as_ref().map(overload::settings).transpose();
    let pressure = pressure.context("overload_manager")?.unwrap_or_default();
    let limits = runtime::limits(&proto.layered_runtime.unwrap_or_default()).context("layered_runtime")?;
    Ok(Bootstrap {
        body,
        node: proto.node.unwrap_or_default(),
        listeners: resources
            .listeners
            .iter()
            .map(|proto| (proto.name.clone(), proto.to_vec().into()))
            .collect(),
        clusters: resources
            .clusters
            .iter()
            .map(|proto| (proto.name.clone(), proto.to_vec().into()))
            .collect(),
        secrets: resources.secrets,
        ads,
        admin,
        limits,
        pressure,
    })
}

fn is_ads(source: Option<&ConfigSource>) -> anyhow::Result<bool> {
    match source.map(|source| source.config_source_specifier.as_ref()) {
        None => Ok(false),
        Some(Some(ConfigSourceSpecifier::Ads(_))) => Ok(true),
        Some(_) => bail!("only `ads: {{}}` is supported, no api_config_source or path_config_source"),
    }
}

fn ads(source: &ApiConfigSource, clusters: bool, listeners: bool) -> anyhow::Result<Ads> {
    let form = match source.api_type() {
        ApiType::Grpc => Form::Sotw,
        ApiType::DeltaGrpc => Form::Delta,
        other => bail!("api_type: {} is not supported: use GRPC or DELTA_GRPC", other.as_str_name()),
    };
    let [service] = source.grpc_services.as_slice() else { bail!("grpc_services: must be one") };
    let Some(TargetSpecifier::EnvoyGrpc(target)) = &service.target_specifier else {
        bail!("grpc_services[0]: must name a cluster by envoy_grpc")
    };
    let metadata =
        service.initial_metadata.iter().map(|header| (header.key.clone(), header.value.clone())).collect();
    Ok(Ads { cluster: target.cluster_name.clone(), form, clusters, listeners, metadata })
}

#[cfg(test)]
mod tests;
