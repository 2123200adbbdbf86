//! Telemetries of a workload, and extension providers.

use std::{borrow::Cow, sync::Arc};

use skysail_core::ClusterName;

use super::{World, policy};
use crate::api::{
    Labels, Telemetry, Typed,
    extension_provider::{ExtensionProvider, FileAccessLog, Zipkin},
    mesh_config::IgnoredValue,
    proxy_tracing::ZipkinAddress,
};

impl World {
    /// Returns the provider of a name, which is compared without regard to case, as Istio does for Telemetries.
    /// Providers `prometheus` and `envoy` are built in.
    pub fn provider(&self, name: &str) -> Option<Cow<'_, ExtensionProvider>> {
        let mut all = self.mesh().extension_providers.iter();
        if let Some(provider) = all.find(|provider| provider.name.eq_ignore_ascii_case(name)) {
            return Some(Cow::Borrowed(provider));
        }
        let name = name.to_ascii_lowercase();
        let mut built_in = ExtensionProvider::default();
        match &*name {
            "prometheus" => built_in.prometheus = Some(IgnoredValue),
            "envoy" => built_in.envoy_file_access_log = Some(FileAccessLog::default()),
            _ => return None,
        }
        Some(Cow::Owned(ExtensionProvider { name, ..built_in }))
    }

    /// Returns the Telemetries that apply to a workload, by rising precedence: the mesh's, the namespace's, then those
    /// that select the workload, oldest first.
    pub fn telemetries(&self, namespace: &str, labels: &Labels) -> Vec<&Arc<Typed<Telemetry>>> {
        let root = self.mesh().root_namespace.as_str();
        let of = |namespace: &str| {
            let mut entries: Vec<_> = self.telemetries.in_namespace(namespace).collect();
            entries.sort_by(|a, b| a.age().cmp(&b.age()));
            entries.into_iter().map(|entry| &entry.object)
        };
        let is_wide = |telemetry: &&Arc<Typed<Telemetry>>| {
            let spec = &telemetry.spec;
            policy::is_wide(spec.selector.as_ref())
                && spec.target_ref.is_none()
                && spec.target_refs.is_empty()
        };
        let mut applying: Vec<_> = of(root).find(is_wide).into_iter().collect();
        if namespace != root {
            applying.extend(of(namespace).find(is_wide));
        }
        applying.extend(of(namespace).filter(|telemetry| {
            let spec = &telemetry.spec;
            let targets = spec.target_ref.iter().chain(&spec.target_refs);
            !is_wide(telemetry) && policy::applies(spec.selector.as_ref(), targets, true, labels)
        }));
        applying
    }

    /// Returns whether a provider names a host as its service.
    pub(super) fn is_provider_host(&self, host: &str) -> bool {
        self.mesh()
            .extension_providers
            .iter()
            .filter_map(ExtensionProvider::service)
            .any(|service| service.split_once('/').map_or(service, |(_, host)| host) == host)
            || self.zipkin_candidates().iter().any(|provider| provider.service == host)
    }

    /// Returns what the address of the collector in `defaultConfig` may mean.
    fn zipkin_candidates(&self) -> Vec<Zipkin> {
        self.mesh()
            .default_config
            .tracing
            .iter()
            .flat_map(|tracing| &tracing.zipkin)
            .flat_map(ZipkinAddress::providers)
            .collect()
    }

    /// Returns the collector of `defaultConfig`: the first reading of its address that is a service. `None` without an
    /// address; an error says why there is no collector.
    pub fn zipkin_collector(&self) -> Option<Result<Zipkin, String>> {
        let candidates = self.zipkin_candidates();
        let is_known = |of: &&Zipkin| self.provider_cluster(&of.service, of.port).is_ok();
        match candidates.iter().find(is_known) {
            Some(found) => Some(Ok(found.clone())),
            None => {
                let literal = candidates.last()?;
                Some(Err(self.provider_cluster(&literal.service, literal.port).err()?))
            }
        }
    }

    /// Returns the external authorizer of this name. An error says why there is none.
    pub fn authorizer(&self, name: &str) -> Result<&ExtensionProvider, String> {
        let mut providers = self.mesh().extension_providers.iter().filter(|provider| provider.name == name);
        let provider = providers.next().ok_or_else(|| {
            format!("extensionProviders of the mesh configuration has no authorizer {name:?}")
        })?;
        let http = provider.envoy_ext_authz_http.as_ref().map(|of| (&of.service, of.port));
        let grpc = provider.envoy_ext_authz_grpc.as_ref().map(|of| (&of.service, of.port));
        let (service, port) =
            http.or(grpc).ok_or_else(|| format!("provider {name:?} is not an external authorizer"))?;
        self.provider_cluster(service, port).map(|_| provider)
    }

    /// Returns the host and the cluster of a provider's service, `HOST` or `NAMESPACE/HOST`. An error says why there is
    /// none.
    pub fn provider_cluster(&self, service: &str, port: u32) -> Result<(String, String), String> {
        let port = u16::try_from(port)
            .ok()
            .filter(|port| *port != 0)
            .ok_or_else(|| format!("{port} is not a port of service {service:?}"))?;
        let (namespace, host) = match service.split_once('/') {
            Some((namespace, host)) => (Some(namespace), host),
            None => (None, service),
        };
        let mut found = self.services_of_host(host);
        found.retain(|of| namespace.is_none_or(|namespace| *of == namespace));
        match found.len() {
            1 => Ok((host.to_owned(), ClusterName::outbound(port, "", host).to_string())),
            0 => Err(format!("there is no service {service:?}")),
            _ => Err(format!("several namespaces define {service:?}; write NAMESPACE/HOST")),
        }
    }
}
