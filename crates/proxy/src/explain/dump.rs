//! Resources that a running proxy holds, from its page `/config_dump?include_eds`, or that its control plane serves.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
};

use anyhow::{Context as _, bail};
use bytes::Bytes;
use serde_json::Value;
use skysail_proto::Codec as _;
use skysail_xds::{
    Kind,
    envoy::pb::{
        envoy::{
            admin::v3::{
                ClustersConfigDump, ConfigDump, EndpointsConfigDump, ListenersConfigDump, RoutesConfigDump,
                SecretsConfigDump, UpdateFailureState,
            },
            config::{
                cluster::v3::Cluster,
                core::v3::Node,
                endpoint::v3::ClusterLoadAssignment,
                listener::v3::Listener,
                route::v3::{RouteConfiguration, VirtualHost},
            },
            extensions::transport_sockets::tls::v3::Secret,
        },
        google::protobuf::Any,
    },
};

use super::EncodedResource;
use crate::translate::{TlsContexts, Translator, bootstrap::convert};

/// Sections of a dump that decide where requests go.
const SECTIONS: [&str; 5] = [
    ".ClustersConfigDump",
    ".EndpointsConfigDump",
    ".ListenersConfigDump",
    ".RoutesConfigDump",
    ".SecretsConfigDump",
];

/// Resources of a running proxy, completed by those that it requests on demand.
#[derive(Debug, Default)]
pub struct HeldResources {
    /// Resources.
    pub resources: Vec<EncodedResource>,
    /// Clusters and virtual hosts that the proxy does not hold yet.
    pub on_demand: BTreeSet<String>,
    /// Resources of which the proxy has refused the newest version: name and reason. The version before
    /// stays.
    pub refused: Vec<(String, String)>,
}

impl HeldResources {
    /// Reads the page of a proxy. `compiled` are all resources that the control plane would send. They
    /// complete the clusters, endpoints and virtual hosts that the proxy does not hold. Secrets of the
    /// control plane are those of `compiled`, because the page has neither revocation lists nor keys.
    ///
    /// # Errors
    /// The page is not a dump, or has types that this program does not know.
    pub fn read(page: &[u8], compiled: Vec<EncodedResource>) -> anyhow::Result<Self> {
        let mut dump: Value = serde_json::from_slice(page).context("the page is not JSON")?;
        let Some(configs) = dump["configs"].as_array_mut() else { bail!("the page has no `configs`") };
        configs.retain(|config| {
            let name = config["@type"].as_str().unwrap_or_default();
            SECTIONS.iter().any(|section| name.ends_with(section))
        });
        let encoded = convert::config_dump(&serde_json::to_vec(&dump)?)?;
        let mut held = Self::default();
        for config in ConfigDump::from_slice(&encoded)?.configs {
            held.add_section(&config)?;
        }
        held.complete(compiled)?;
        Ok(held)
    }

    /// Reads the page `/debug/config_dump` of a control plane, which has all that it serves to a proxy, except secrets.
    /// Secrets are taken from `compiled`.
    ///
    /// # Errors
    /// The page is not a dump.
    pub fn served(page: &[u8], compiled: Vec<EncodedResource>) -> anyhow::Result<Self> {
        let mut held = Self::default();
        for config in ConfigDump::from_slice(page).context("the page is not a dump")?.configs {
            held.add_section(&config)?;
        }
        for table in held.resources.iter_mut().filter(|resource| resource.kind == Kind::Route) {
            table.body = merge(&table.body, &[], &mut held.on_demand)?;
        }
        held.resources.extend(compiled.into_iter().filter(|resource| resource.kind == Kind::Secret));
        Ok(held)
    }

    /// Reads the page `/clusters?format=json` of a proxy. Returns the endpoints that outlier detection has
    /// ejected, with their clusters.
    ///
    /// # Errors
    /// The page is not JSON, or has no clusters.
    pub fn ejected(page: &[u8]) -> anyhow::Result<Vec<(String, SocketAddr)>> {
        let page: Value = serde_json::from_slice(page).context("the page is not JSON")?;
        let Some(clusters) = page["cluster_statuses"].as_array() else {
            bail!("the page has no `cluster_statuses`")
        };
        let mut ejected = Vec::new();
        for cluster in clusters {
            let hosts = cluster["host_statuses"].as_array().into_iter().flatten();
            let hosts = hosts.filter(|host| host["health_status"]["failed_outlier_check"] == true);
            let address = |host: &Value| {
                let address = &host["address"]["socket_address"];
                let port = u16::try_from(address["port_value"].as_u64()?).ok()?;
                Some(SocketAddr::new(address["address"].as_str()?.parse().ok()?, port))
            };
            let name = cluster["name"].as_str().unwrap_or_default();
            ejected.extend(hosts.filter_map(address).map(|address| (name.to_owned(), address)));
        }
        Ok(ejected)
    }

    fn add_section(&mut self, section: &Any) -> anyhow::Result<()> {
        let bytes = &*section.value;
        match section.type_url.rsplit('.').next() {
            Some("ClustersConfigDump") => {
                let dump = ClustersConfigDump::from_slice(bytes)?;
                let fixed = dump.static_clusters.into_iter().filter_map(|of| of.cluster);
                for of in &dump.dynamic_active_clusters {
                    self.note(of.cluster.as_ref(), of.error_state.as_ref(), |body| {
                        Cluster::from_slice(body).map(|cluster| cluster.name).unwrap_or_default()
                    });
                }
                let active = dump.dynamic_active_clusters.into_iter().filter_map(|of| of.cluster);
                for any in fixed.chain(active) {
                    let name = Cluster::from_slice(&any.value)?.name;
                    self.add(Kind::Cluster, name, any);
                }
            }
            Some("EndpointsConfigDump") => {
                let dump = EndpointsConfigDump::from_slice(bytes)?;
                let fixed = dump.static_endpoint_configs.into_iter().filter_map(|of| of.endpoint_config);
                let active = dump.dynamic_endpoint_configs.into_iter().filter_map(|of| of.endpoint_config);
                for any in fixed.chain(active) {
                    let name = ClusterLoadAssignment::from_slice(&any.value)?.cluster_name;
                    self.add(Kind::Endpoint, name, any);
                }
            }
            Some("ListenersConfigDump") => {
                let dump = ListenersConfigDump::from_slice(bytes)?;
                for of in &dump.dynamic_listeners {
                    let name = of.name.clone();
                    self.note(Some(&Any::default()), of.error_state.as_ref(), |_| name.clone());
                    if of.active_state.is_none() && of.warming_state.is_some() {
                        let reason = "not in effect yet: it waits for its route table or its certificate";
                        self.refused.push((of.name.clone(), reason.to_owned()));
                    }
                }
                let fixed = dump.static_listeners.into_iter().filter_map(|of| of.listener);
                let active = dump.dynamic_listeners.into_iter().filter_map(|of| of.active_state?.listener);
                for any in fixed.chain(active) {
                    let name = Listener::from_slice(&any.value)?.name;
                    self.add(Kind::Listener, name, any);
                }
            }
            Some("RoutesConfigDump") => {
                // Static tables are inline in listeners.
                let dump = RoutesConfigDump::from_slice(bytes)?;
                for of in &dump.dynamic_route_configs {
                    self.note(of.route_config.as_ref(), of.error_state.as_ref(), |body| {
                        RouteConfiguration::from_slice(body).map(|table| table.name).unwrap_or_default()
                    });
                }
                for any in dump.dynamic_route_configs.into_iter().filter_map(|of| of.route_config) {
                    let name = RouteConfiguration::from_slice(&any.value)?.name;
                    self.add(Kind::Route, name, any);
                }
            }
            Some("SecretsConfigDump") => {
                let dump = SecretsConfigDump::from_slice(bytes)?;
                let fixed = dump.static_secrets.into_iter().filter_map(|of| of.secret);
                let active = dump.dynamic_active_secrets.into_iter().filter_map(|of| of.secret);
                for any in fixed.chain(active) {
                    let name = Secret::from_slice(&any.value)?.name;
                    self.add(Kind::Secret, name, any);
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// Notes that the newest version of a resource was refused.
    fn note(
        &mut self,
        body: Option<&Any>,
        failure: Option<&UpdateFailureState>,
        name: impl Fn(&[u8]) -> String,
    ) {
        let (Some(body), Some(failure)) = (body, failure) else { return };
        self.refused.push((name(&body.value), format!("newest version refused: {}", failure.details)));
    }

    fn add(&mut self, kind: Kind, name: String, any: Any) {
        self.resources.push(EncodedResource { kind, name, body: Bytes::from(any.value) });
    }

    /// Notes why a proxy has no version of a route table, if a `skysail-proxy` refuses it.
    fn explain_absence(&mut self, table: &EncodedResource) {
        let (tls, node) = (TlsContexts::default(), Node::default());
        let translator = Translator { tls: &tls, node: &node, strict: false };
        if let Err(reject) = translator.routes(&table.body) {
            self.refused.push((table.name.clone(), reject.to_string()));
        }
    }

    fn complete(&mut self, compiled: Vec<EncodedResource>) -> anyhow::Result<()> {
        let names: BTreeSet<(usize, String)> =
            self.resources.iter().map(|held| (held.kind as usize, held.name.clone())).collect();
        for resource in compiled {
            let is_held = names.contains(&(resource.kind as usize, resource.name.clone()));
            match resource.kind {
                Kind::Cluster | Kind::Endpoint if !is_held => {
                    if resource.kind == Kind::Cluster {
                        self.on_demand.insert(resource.name.clone());
                    }
                    self.resources.push(resource);
                }
                Kind::Secret => {
                    self.resources.retain(|held| held.kind != Kind::Secret || held.name != resource.name);
                    self.resources.push(resource);
                }
                Kind::Route if !is_held => self.explain_absence(&resource),
                // Listeners are all sent. A route table that is not held is one that no listener uses, or
                // that the proxy refuses.
                Kind::Route if is_held => {
                    let mine = self
                        .resources
                        .iter_mut()
                        .find(|held| held.kind == Kind::Route && held.name == resource.name);
                    if let Some(mine) = mine {
                        mine.body = merge(&mine.body, &resource.body, &mut self.on_demand)?;
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }
}

/// Adds the virtual hosts that the proxy requests on demand to its route table.
fn merge(held: &[u8], compiled: &[u8], on_demand: &mut BTreeSet<String>) -> anyhow::Result<Bytes> {
    let mut table = RouteConfiguration::from_slice(held)?;
    if table.vhds.take().is_none() {
        return Ok(Bytes::copy_from_slice(held));
    }
    let prefix = format!("{}/", table.name);
    let mut hosts: BTreeMap<String, VirtualHost> = BTreeMap::new();
    for mut host in table.virtual_hosts {
        if let Some(name) = host.name.strip_prefix(&prefix) {
            host.name = name.to_owned();
        }
        hosts.insert(host.name.clone(), host);
    }
    let held_domains: BTreeSet<String> = hosts.values().flat_map(|host| host.domains.clone()).collect();
    for host in RouteConfiguration::from_slice(compiled)?.virtual_hosts {
        let is_held =
            hosts.contains_key(&host.name) || host.domains.iter().any(|domain| held_domains.contains(domain));
        if !is_held {
            on_demand.insert(host.name.clone());
            hosts.insert(host.name.clone(), host);
        }
    }
    table.virtual_hosts = hosts.into_values().collect();
    Ok(Bytes::from(table.to_vec()))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn table(hosts: &[(&str, &str)], vhds: bool) -> RouteConfiguration {
        let hosts = hosts.iter().map(|(name, domain)| VirtualHost {
            name: (*name).to_owned(),
            domains: vec![(*domain).to_owned()],
            ..VirtualHost::default()
        });
        RouteConfiguration {
            name: "80".to_owned(),
            virtual_hosts: hosts.collect(),
            vhds: vhds.then(Default::default),
            ..RouteConfiguration::default()
        }
    }

    #[test]
    fn what_a_proxy_holds_is_completed_by_what_it_requests_on_demand() {
        let page = json!({"configs": [
            {"@type": "type.googleapis.com/envoy.admin.v3.BootstrapConfigDump", "bootstrap": {"unknown": 1}},
            {"@type": "type.googleapis.com/envoy.admin.v3.ClustersConfigDump", "dynamic_active_clusters": [
                {"cluster": {"@type": "type.googleapis.com/envoy.config.cluster.v3.Cluster", "name": "a"},
                    "error_state": {"details": "a field"}}]},
            {"@type": "type.googleapis.com/envoy.admin.v3.RoutesConfigDump", "dynamic_route_configs": [
                {"route_config": {"@type": "type.googleapis.com/envoy.config.route.v3.RouteConfiguration",
                    "name": "80", "vhds": {}, "virtual_hosts": [{"name": "80/a:80", "domains": ["old"]}]}}]},
        ]});
        let routes = table(&[("a:80", "new"), ("b:80", "b")], false).to_vec();
        let compiled =
            [("a", Kind::Cluster, Vec::new()), ("b", Kind::Cluster, Vec::new()), ("80", Kind::Route, routes)];
        let compiled = compiled.map(|(name, kind, body)| EncodedResource {
            kind,
            name: name.to_owned(),
            body: body.into(),
        });
        let held = HeldResources::read(page.to_string().as_bytes(), compiled.to_vec()).unwrap();
        assert_eq!(held.on_demand, ["b".to_owned(), "b:80".to_owned()].into());
        assert_eq!(held.refused, [("a".to_owned(), "newest version refused: a field".to_owned())]);
        let routes = held.resources.iter().find(|resource| resource.kind == Kind::Route).unwrap();
        let routes = RouteConfiguration::from_slice(&routes.body).unwrap();
        let hosts: Vec<_> =
            routes.virtual_hosts.iter().map(|host| (host.name.as_str(), host.domains[0].as_str())).collect();
        assert_eq!(hosts, [("a:80", "old"), ("b:80", "b")]);
    }

    #[test]
    fn ejected_endpoints_are_those_of_outlier_detection() {
        let host = |address: &str, status: Value| {
            let address = json!({"socket_address": {"address": address, "port_value": 80}});
            json!({"address": address, "health_status": status})
        };
        let hosts = json!([
            host("10.0.0.1", json!({"eds_health_status": "HEALTHY", "failed_outlier_check": true})),
            host("10.0.0.2", json!({"eds_health_status": "UNHEALTHY"})),
            {"address": {"pipe": {"path": "/a"}}, "health_status": {"failed_outlier_check": true}},
        ]);
        let page = json!({"cluster_statuses": [{"name": "a", "host_statuses": hosts}, {"name": "b"}]});
        let ejected = HeldResources::ejected(page.to_string().as_bytes()).unwrap();
        assert_eq!(ejected, [("a".to_owned(), ([10, 0, 0, 1], 80).into())]);
        assert!(HeldResources::ejected(b"{}").is_err() && HeldResources::ejected(b"").is_err());
    }

    #[test]
    fn a_complete_table_is_not_changed() {
        let held = table(&[("a:80", "old")], false).to_vec();
        let compiled = table(&[("b:80", "b")], false).to_vec();
        let mut on_demand = BTreeSet::new();
        assert_eq!(merge(&held, &compiled, &mut on_demand).unwrap(), held);
        assert!(on_demand.is_empty());
        assert!(HeldResources::read(b"<html>", Vec::new()).is_err());
    }
}
