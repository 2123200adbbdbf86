//! Names of clusters in statistics: `inboundClusterStatName` and `outboundClusterStatName` of the mesh configuration.

use crate::api::{Service, ServicePort, Typed};

/// Values of the variables of a pattern.
#[derive(Clone, Debug, Default)]
pub(super) struct StatNameVariables<'a> {
    /// Full name of the service; empty without one.
    pub(super) host: String,
    /// Name and namespace, if it is a service of Kubernetes.
    pub(super) kubernetes: Option<(&'a str, &'a str)>,
    pub(super) subset: &'a str,
    pub(super) port: u16,
    pub(super) port_name: &'a str,
    /// Port of the workload.
    pub(super) target: u16,
}

impl<'a> StatNameVariables<'a> {
    /// Returns the names of a service without a port.
    pub(super) fn of_service(service: &'a Typed<Service>) -> Self {
        let is_kubernetes = service.spec.entry_host.is_none();
        let meta = &service.meta;
        Self {
            host: service.fqdn(),
            kubernetes: is_kubernetes.then_some((&meta.name, &meta.namespace)),
            ..Self::default()
        }
    }

    /// Returns the names of a service port.
    pub(super) fn of_port(service: &'a Typed<Service>, port: &'a ServicePort, target: u16) -> Self {
        Self { port: port.port, port_name: &port.name, target, ..Self::of_service(service) }
    }

    /// Replaces the variables of a pattern.
    pub(super) fn fill(&self, pattern: &str) -> String {
        let short = self.kubernetes.map(|(name, namespace)| format!("{name}.{namespace}"));
        let name = self.kubernetes.map_or(self.host.as_str(), |(name, _)| name);
        let (port, target) = (self.port.to_string(), self.target.to_string());
        let mut filled = String::with_capacity(pattern.len());
        let mut rest = pattern;
        while let Some(start) = rest.find('%') {
            filled.push_str(&rest[..start]);
            rest = &rest[start..];
            let variables: [(&str, &str); 7] = [
                ("%SERVICE%", short.as_deref().unwrap_or(&self.host)),
                ("%SERVICE_NAME%", name),
                ("%SERVICE_FQDN%", &self.host),
                ("%SUBSET_NAME%", self.subset),
                ("%TARGET_PORT%", &target),
                ("%SERVICE_PORT%", &port),
                ("%SERVICE_PORT_NAME%", self.port_name),
            ];
            match variables.into_iter().find(|(variable, _)| rest.starts_with(variable)) {
                Some((variable, value)) => {
                    filled.push_str(value);
                    rest = &rest[variable.len()..];
                }
                None => {
                    filled.push('%');
                    rest = &rest[1..];
                }
            }
        }
        filled.push_str(rest);
        filled
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_are_replaced() {
        let of_kubernetes = StatNameVariables {
            host: "a.shop.svc.cluster.local".into(),
            kubernetes: Some(("a", "shop")),
            subset: "v1",
            port: 80,
            port_name: "http",
            target: 8080,
        };
        let pattern = "%SERVICE%|%SERVICE_NAME%|%SERVICE_FQDN%|%SUBSET_NAME%|%TARGET_PORT%|%SERVICE_PORT%|\
                       %SERVICE_PORT_NAME%|50%|%X%";
        let filled = of_kubernetes.fill(pattern);
        assert_eq!(filled, "a.shop|a|a.shop.svc.cluster.local|v1|8080|80|http|50%|%X%");
        let other = StatNameVariables { host: "a.example.com".into(), ..StatNameVariables::default() };
        assert_eq!(other.fill("%SERVICE% %SERVICE_NAME%"), "a.example.com a.example.com");
    }
}
