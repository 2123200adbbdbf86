//! Aliases: Services of type ExternalName, which are other names of a host. As in Istio, they have neither clusters nor
//! listeners. Requests to an alias go to the service of its host; without such a service they are unknown destinations.

use std::{collections::BTreeMap, sync::Arc};

use super::{World, hosts::fqdn};
use crate::api::{Service, Typed};

/// Maximum number of aliases between a name and its service.
const MAX_HOPS: usize = 8;

impl World {
    /// Returns the target of an alias; returns a host that is no alias unchanged.
    pub fn aliased<'a>(&'a self, host: &'a str) -> &'a str {
        let mut host = host;
        for _ in 0..MAX_HOPS {
            let service = self.service(host).map(|service| &service.spec);
            match service.and_then(|service| service.external_name.as_deref()) {
                Some(target) => host = target,
                None => break,
            }
        }
        host
    }

    /// Returns the aliases that clients of a namespace see, by the full name of their service.
    pub(crate) fn aliases(&self, client_namespace: &str) -> BTreeMap<String, Vec<&Arc<Typed<Service>>>> {
        let mut aliases: BTreeMap<String, Vec<&Arc<Typed<Service>>>> = BTreeMap::new();
        let external = self.services().filter(|service| service.spec.external_name.is_some());
        for alias in external.filter(|alias| self.service_visible(alias, client_namespace)) {
            let name = alias.fqdn();
            let target = fqdn(self.aliased(&name), "");
            // An alias of itself names no service.
            if self.service(&target).is_some_and(|service| service.spec.external_name.is_none()) {
                aliases.entry(target).or_default().push(alias);
            }
        }
        aliases
    }
}
