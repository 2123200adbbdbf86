//! Services of extension providers.

use skysail_core::ClusterName;

use super::World;
use crate::api::extension_provider::ExtensionProvider;

impl World {
    /// Returns the provider of a name, which is compared without regard to case, as Istio does for Telemetries.
    pub fn provider(&self, name: &str) -> Option<&ExtensionProvider> {
        self.mesh().extension_providers.iter().find(|provider| provider.name.eq_ignore_ascii_case(name))
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
