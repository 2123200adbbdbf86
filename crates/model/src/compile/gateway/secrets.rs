//! SDS of gateways: the Secrets that the servers of a proxy name, from the proxy's own namespace.

use std::{collections::BTreeSet, sync::Arc};

use skysail_xds::{
    Kind, Resource,
    envoy::pb::envoy::extensions::transport_sockets::tls::v3::{
        CertificateValidationContext, Secret as SdsSecret, TlsCertificate, secret::Type,
    },
};

use super::{
    servers::{GatewayServer, Merged},
    tls::{self, PREFIX, ROOTS},
};
use crate::{
    ProxyView, World,
    api::destination_rule::{ClientTls, TlsMode},
    compile::{order, pb::core},
    world::{CONFIG_MAP, CREDENTIAL},
};

/// Returns the secrets of a proxy. Only a proxy with a proven identity gets any, and only those of its namespace that
/// a Gateway of its own names.
pub(super) fn compile(world: &World, view: &ProxyView, merged: &Merged<'_>) -> Vec<Arc<Resource>> {
    if !view.is_authenticated {
        return Vec::new();
    }
    let servers = merged.groups.iter().flat_map(|group| &group.servers);
    let of_server = |server: &GatewayServer<'_>| {
        let derived = server.gateway.spec.only_in.is_some();
        let names = server.tls().map(tls::secrets).unwrap_or_default().into_iter();
        // Only Gateways that are made from those of Gateway API were checked to be permitted such references.
        names.filter(move |name| derived || !name.starts_with(CREDENTIAL)).collect::<Vec<_>>()
    };
    let names: BTreeSet<String> = servers.flat_map(of_server).collect();
    let made = names.into_iter().filter_map(|name| of_name(world, &view.namespace, &name));
    made.map(|secret| order::encode(Kind::Secret, &secret.name, &secret)).collect()
}

/// Returns the secrets that DestinationRules name for a proxy's connections to servers. As in [`compile`], the proxy has
/// a proven identity and the Secrets are in its namespace. A sidecar gets those of rules that select it.
pub(in crate::compile) fn of_rules(world: &World, view: &ProxyView) -> Vec<Arc<Resource>> {
    if !view.is_authenticated {
        return Vec::new();
    }
    let names: BTreeSet<String> =
        world.client_credentials(view).into_iter().flat_map(client_secrets).collect();
    let made = names.into_iter().filter_map(|name| of_name(world, &view.namespace, &name));
    made.map(|secret| order::encode(Kind::Secret, &secret.name, &secret)).collect()
}

/// Returns the names of the secrets of TLS to a server.
fn client_secrets(tls: &ClientTls) -> impl Iterator<Item = String> {
    let name = &tls.credential_name;
    let name = if name.contains("://") { name.clone() } else { format!("{PREFIX}{name}") };
    let roots = (tls.insecure_skip_verify != Some(true)).then(|| format!("{name}{ROOTS}"));
    (tls.mode == TlsMode::Mutual).then_some(name).into_iter().chain(roots)
}

/// Returns a secret; `None` if it does not exist, or has nothing of the demanded kind.
fn of_name(world: &World, namespace: &str, name: &str) -> Option<SdsSecret> {
    if let Some(path) = name.strip_prefix(CONFIG_MAP) {
        let (namespace, map) = path.strip_suffix(ROOTS)?.split_once('/')?;
        let roots = world.root_map(namespace, map)?;
        let trusted_ca = inline(roots.as_bytes());
        let context = CertificateValidationContext { trusted_ca, ..Default::default() };
        return Some(SdsSecret { name: name.to_owned(), r#type: Some(Type::ValidationContext(context)) });
    }
    let (namespace, bare) = match name.strip_prefix(CREDENTIAL) {
        Some(path) => path.split_once('/')?,
        None => (namespace, name.strip_prefix(PREFIX)?),
    };
    let content = match bare.strip_suffix(ROOTS) {
        // As in Istio, the roots are in a Secret of their own or beside the certificate.
        Some(stem) => roots(world, namespace, bare, stem)?,
        None => {
            let secret = world.secret(namespace, bare)?;
            match secret.pair() {
                Some(pair) => Type::TlsCertificate(TlsCertificate {
                    certificate_chain: inline(pair.chain),
                    private_key: inline(pair.key),
                    ..Default::default()
                }),
                None => validation(secret)?,
            }
        }
    };
    Some(SdsSecret { name: name.to_owned(), r#type: Some(content) })
}

fn roots(world: &World, namespace: &str, name: &str, stem: &str) -> Option<Type> {
    let secret = world.secret(namespace, name).or_else(|| world.secret(namespace, stem))?;
    validation(secret)
}

fn validation(secret: &crate::api::secret::Secret) -> Option<Type> {
    Some(Type::ValidationContext(CertificateValidationContext {
        trusted_ca: inline(secret.roots()?),
        crl: secret.revocations().and_then(inline),
        ..Default::default()
    }))
}

fn inline(bytes: &[u8]) -> Option<core::DataSource> {
    let specifier = Some(core::data_source::Specifier::InlineBytes(bytes.to_vec()));
    Some(core::DataSource { specifier, ..Default::default() })
}
