//! SDS of gateways: the Secrets that the servers of a proxy name, and the certificate that it presents to backends. They
//! are in the proxy's own namespace, or in one that permits the reference of a Gateway of Gateway API.

use std::{collections::BTreeSet, sync::Arc};

use skysail_xds::{
    Kind, Resource,
    envoy::pb::envoy::extensions::transport_sockets::tls::v3::{
        CertificateValidationContext, Secret as SdsSecret, TlsCertificate, secret::Type,
    },
};

use super::{
    servers::{MergedServers, merge_servers},
    tls,
};
use crate::{
    ProxyView, Role, World,
    api::{
        Gateway,
        destination_rule::{ClientTls, ClientTlsMode},
        gateway::ServerTls,
    },
    compile::{order, pb::core},
    world::{CONFIG_MAP, CREDENTIAL, ROOTS, SECRET},
};

/// Returns the secrets of a proxy. Only a proxy with a proven identity gets any, and only those that a Gateway of its own
/// names.
pub(super) fn compile(world: &World, view: &ProxyView, merged: &MergedServers<'_>) -> Vec<Arc<Resource>> {
    if !view.is_authenticated {
        return Vec::new();
    }
    let names = names_of_servers(merged).into_iter().chain(for_backends(world, view));
    let names: BTreeSet<String> = names.collect();
    names.iter().filter_map(|name| encoded(world, view, name)).collect()
}

/// Returns the name of the secret with the certificate that a gateway presents to servers
/// ([`ClientScope::client_credential`](crate::ClientScope)).
fn for_backends(world: &World, view: &ProxyView) -> Option<String> {
    if view.role != Role::Router {
        return None;
    }
    let gateways = world.gateways(&view.namespace, &view.labels);
    gateways.into_iter().find_map(|gateway| gateway.spec.client_credential.clone())
}

/// Compiles those secrets of a gateway that may differ after a change of Secrets (namespace, name). Returns each name
/// with its secret, or with `None` if the gateway has no such secret any more. `is_sent` returns whether the gateway
/// has a secret of a name.
pub(in crate::compile) fn changed(
    world: &World,
    view: &ProxyView,
    secrets: &BTreeSet<(String, String)>,
    is_sent: impl Fn(&str) -> bool,
) -> Vec<(Arc<str>, Option<Arc<Resource>>)> {
    if !view.is_authenticated {
        return Vec::new();
    }
    let names = secrets.iter().flat_map(|(namespace, name)| names_from(namespace, name, &view.namespace));
    let (mut affected, others): (BTreeSet<String>, BTreeSet<String>) = names.partition(|name| is_sent(name));
    // A gateway may have thousands of servers. They are merged only if one may name a secret that is not sent yet.
    let of_rules = || {
        let named = world.client_credentials(view).into_iter().flat_map(client_secrets);
        named.chain(for_backends(world, view))
    };
    let gateways = world.gateways(&view.namespace, &view.labels);
    let servers =
        gateways.iter().flat_map(|gateway| gateway.spec.servers.iter().map(move |of| (gateway, of)));
    let of_servers = servers
        .flat_map(|(gateway, server)| names_of_server(&gateway.spec, server.terminating_or_forwarded_tls()));
    if of_servers.chain(of_rules()).any(|name| others.contains(&name)) {
        let mut named = names_of_servers(&merge_servers(world, view));
        named.extend(of_rules());
        affected.extend(others.into_iter().filter(|name| named.contains(name)));
    }
    affected.into_iter().map(|name| (name.as_str().into(), encoded(world, view, &name))).collect()
}

/// Returns the names of all secrets that may come from a Secret, for a proxy of namespace `client`.
fn names_from<'a>(namespace: &'a str, name: &'a str, client: &'a str) -> impl Iterator<Item = String> {
    // A Secret may also have the roots of a credential.
    ["", ROOTS].into_iter().flat_map(move |suffix| {
        let own = (namespace == client).then(|| format!("{SECRET}{name}{suffix}"));
        own.into_iter().chain([format!("{CREDENTIAL}{namespace}/{name}{suffix}")])
    })
}

fn names_of_servers(merged: &MergedServers<'_>) -> BTreeSet<String> {
    let servers = merged.groups.iter().flat_map(|group| &group.servers);
    servers.flat_map(|server| names_of_server(&server.gateway.spec, server.tls())).collect()
}

fn names_of_server(gateway: &Gateway, tls: Option<&ServerTls>) -> impl Iterator<Item = String> {
    let derived = gateway.only_in.is_some();
    let names = tls.map(tls::secrets).unwrap_or_default().into_iter();
    // Only Gateways that are made from those of Gateway API were checked to be permitted such references.
    names.filter(move |name| derived || !(name.starts_with(CREDENTIAL) || name.starts_with(CONFIG_MAP)))
}

/// Returns the secrets that DestinationRules name for a proxy's connections to servers. As in [`compile`], the proxy
/// has a proven identity and the Secrets are in its namespace. A sidecar gets those of rules that select it.
pub(in crate::compile) fn of_rules(world: &World, view: &ProxyView) -> Vec<Arc<Resource>> {
    if !view.is_authenticated {
        return Vec::new();
    }
    let names: BTreeSet<String> =
        world.client_credentials(view).into_iter().flat_map(client_secrets).collect();
    names.iter().filter_map(|name| encoded(world, view, name)).collect()
}

/// Returns an encoded secret; `None` as for [`of_name`].
fn encoded(world: &World, view: &ProxyView, name: &str) -> Option<Arc<Resource>> {
    let secret = of_name(world, &view.namespace, name)?;
    Some(order::encode(Kind::Secret, &secret.name, &secret))
}

/// Returns the names of the secrets of TLS to a server.
fn client_secrets(tls: &ClientTls) -> impl Iterator<Item = String> {
    let name = &tls.credential_name;
    let name = if name.contains("://") { name.clone() } else { format!("{SECRET}{name}") };
    let roots = (tls.insecure_skip_verify != Some(true)).then(|| format!("{name}{ROOTS}"));
    (tls.mode == ClientTlsMode::Mutual).then_some(name).into_iter().chain(roots)
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
        None => (namespace, name.strip_prefix(SECRET)?),
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
