//! Addresses that a Gateway requests (`spec.addresses`), and the conditions about them.
//!
//! As in Istio, one IP address is requested of the Service of the proxies, and hosts name the Services of proxies that
//! were deployed by hand. Other addresses are not supported: without a supported one, the Gateway is not served.

use std::collections::BTreeSet;

use super::status::{StatusCondition, fails, replace};
use crate::{
    api::{
        Kind, ObjectKey, Typed,
        gateway_api::{GatewayAddress, IP_ADDRESS, KubernetesGateway},
    },
    world::{DOMAIN, World, fqdn},
};

/// Type of an address that names a Service.
const HOSTNAME: &str = "Hostname";

impl Typed<KubernetesGateway> {
    /// Returns the values of addresses that are not supported. Those of gateways between networks are for clients of
    /// other networks.
    fn unsupported_addresses(&self) -> Vec<&str> {
        let addresses = &self.spec.addresses;
        let joins_networks = self.spec.is_between_networks(&self.meta.labels);
        let is_managed = matches!(&addresses[..], [only] if only.kind() == IP_ADDRESS);
        let unsupported = addresses.iter().filter(|of| {
            of.kind() != HOSTNAME && !(of.kind() == IP_ADDRESS && (is_managed || joins_networks))
        });
        unsupported.map(|of| of.value.as_str()).collect()
    }

    /// Returns the Services that addresses name.
    pub(super) fn named_services(&self) -> impl Iterator<Item = ObjectKey> {
        let hosts = self.spec.addresses.iter().filter(|of| of.kind() == HOSTNAME);
        hosts.filter_map(|of| {
            let host = fqdn(&of.value, &self.meta.namespace);
            let (name, namespace) = host.strip_suffix(DOMAIN)?.strip_suffix(".svc.")?.split_once('.')?;
            Some(ObjectKey { kind: Kind::Service, namespace: namespace.to_owned(), name: name.to_owned() })
        })
    }

    /// Returns whether the Gateway requests addresses and none of them is supported.
    pub(super) fn has_no_supported_address(&self) -> bool {
        let count = self.spec.addresses.len();
        count > 0 && self.unsupported_addresses().len() == count
    }
}

impl World {
    /// Changes the conditions of a Gateway by the addresses that it requests.
    pub(super) fn check_addresses(
        &self,
        gateway: &Typed<KubernetesGateway>,
        conditions: &mut [StatusCondition],
    ) {
        let mut set = |condition: StatusCondition| replace(conditions, &condition);
        let unsupported = gateway.unsupported_addresses();
        if !unsupported.is_empty() {
            let message = format!("only type Hostname is supported, ignoring {}", unsupported.join(", "));
            set(fails("Accepted", "UnsupportedAddress", message));
        }
        if gateway.has_no_supported_address() {
            let message = "none of the requested addresses is supported";
            set(fails("Programmed", "UnsupportedAddress", message));
        } else if let Some((reason, message)) = self.unusable_address(gateway) {
            set(fails("Programmed", reason, message));
        }
    }

    /// Returns the addresses of a Gateway. As in Istio, a Service without an external address is known by its name.
    pub(super) fn gateway_addresses(&self, gateway: &Typed<KubernetesGateway>) -> Vec<String> {
        let (selector, namespace) = self.proxies_of(gateway);
        let external = self.addresses_of_gateways(&selector, Some(&namespace));
        if !external.is_empty() {
            return external.into_iter().cloned().collect();
        }
        let named = gateway.named_services();
        let named = named.filter_map(|of| Some(self.service_named(&of.namespace, &of.name)?.fqdn()));
        named.chain(self.internal_service(gateway).map(|service| service.fqdn())).collect()
    }

    /// Returns why a requested address cannot be used.
    fn unusable_address(&self, gateway: &Typed<KubernetesGateway>) -> Option<(&'static str, String)> {
        let mut hosts = gateway.spec.addresses.iter().filter(|of| of.kind() == HOSTNAME);
        let is_unknown =
            |of: &&GatewayAddress| self.service(&fqdn(&of.value, &gateway.meta.namespace)).is_none();
        if let Some(unknown) = hosts.find(is_unknown) {
            return Some(("AddressNotUsable", format!("there is no Service {:?}", unknown.value)));
        }
        let [only] = &gateway.spec.addresses[..] else { return None };
        if only.kind() != IP_ADDRESS || !gateway.unsupported_addresses().is_empty() {
            return None;
        }
        let (selector, namespace) = self.proxies_of(gateway);
        let assigned: BTreeSet<&String> = self.addresses_of_gateways(&selector, Some(&namespace));
        let is_ip = |address: &&&String| address.parse::<std::net::IpAddr>().is_ok();
        if only.value.is_empty() {
            let message = "no Service of the gateway's proxies has an IP address".to_owned();
            return assigned.iter().find(is_ip).is_none().then_some(("AddressNotAssigned", message));
        }
        let message = format!("no Service of the gateway's proxies has the address {}", only.value);
        (!assigned.contains(&only.value)).then_some(("AddressNotUsable", message))
    }
}
