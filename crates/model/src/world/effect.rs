//! What a change of the configuration has an effect on, in words for people.

use super::{World, check::label_text, fqdn};
use crate::{
    api::{
        ConfigMap, Kind, Labels, MtlsMode, Object, ObjectKey, destination_rule::WorkloadSelector,
        mesh_config, security::Action, selects,
    },
    files::Change,
};

/// Longer lists of hosts are cut.
const LISTED: usize = 3;

impl World {
    /// Describes what a change that is about to be applied has an effect on: hosts for routing, workloads for policies. For a
    /// policy that is deleted, it also says which requests are accepted without it. `None` for kinds without an effect of
    /// their own on proxies, such as Pods.
    pub fn effect(&self, change: &Change) -> Option<String> {
        match change {
            Change::Apply(object, _) => self.reach(object),
            Change::Delete(key) => {
                let reach = self.reach(&self.object(key)?)?;
                Some(match self.opened_without(key) {
                    Some(opened) => format!("{reach}; {opened}"),
                    None => reach,
                })
            }
        }
    }

    fn reach(&self, object: &Object) -> Option<String> {
        let host = |host: &String, namespace: &str| fqdn(host, namespace);
        Some(match object {
            Object::VirtualService(object) => {
                let hosts = object.spec.hosts.iter().map(|name| host(name, &object.meta.namespace));
                format!("requests to {}", list(hosts.collect()))
            }
            Object::DestinationRule(object) => {
                format!("connections to {}", host(&object.spec.host, &object.meta.namespace))
            }
            Object::ServiceEntry(object) => format!("connections to {}", list(object.spec.hosts.clone())),
            Object::Service(object) => {
                format!("connections to {}", fqdn(&object.meta.name, &object.meta.namespace))
            }
            Object::PeerAuthentication(object) => {
                self.workloads_text(&object.meta.namespace, object.spec.selector.as_ref())
            }
            Object::AuthorizationPolicy(object) => {
                self.workloads_text(&object.meta.namespace, object.spec.selector.as_ref())
            }
            Object::ConfigMap(object) if matches!(object.spec, ConfigMap::Mesh(_)) => {
                "all proxies of the mesh".to_owned()
            }
            _ => return None,
        })
    }

    fn object(&self, key: &ObjectKey) -> Option<Object> {
        let (namespace, name) = (key.namespace.as_str(), key.name.as_str());
        Some(match key.kind {
            Kind::VirtualService => {
                Object::VirtualService(self.virtual_services.get(namespace, name)?.object.clone())
            }
            Kind::DestinationRule => {
                Object::DestinationRule(self.destination_rules.get(namespace, name)?.object.clone())
            }
            Kind::ServiceEntry => {
                Object::ServiceEntry(self.service_entries.get(namespace, name)?.object.clone())
            }
            Kind::Service => Object::Service(self.services.get(namespace, name)?.object.clone()),
            Kind::PeerAuthentication => {
                Object::PeerAuthentication(self.peer_authentications.get(namespace, name)?.object.clone())
            }
            Kind::AuthorizationPolicy => {
                Object::AuthorizationPolicy(self.authorization_policies.get(namespace, name)?.object.clone())
            }
            Kind::ConfigMap if (namespace, name) == (mesh_config::NAMESPACE, mesh_config::NAME) => {
                Object::ConfigMap(self.mesh.as_ref()?.object.clone())
            }
            _ => return None,
        })
    }

    fn workloads_text(&self, namespace: &str, selector: Option<&WorkloadSelector>) -> String {
        let labels = selector.map(|selector| &selector.match_labels).filter(|labels| !labels.is_empty());
        let labels =
            labels.map_or_else(String::new, |labels| format!(" with the labels {}", label_text(labels)));
        match namespace == self.mesh().root_namespace {
            true => format!("all workloads of the mesh{labels}"),
            false => format!("workloads of namespace {namespace}{labels}"),
        }
    }

    /// The file in which an object with an effect was read.
    pub fn file_of(&self, key: &ObjectKey) -> Option<String> {
        let (namespace, name) = (key.namespace.as_str(), key.name.as_str());
        let origin = match key.kind {
            Kind::VirtualService => &self.virtual_services.get(namespace, name)?.origin,
            Kind::DestinationRule => &self.destination_rules.get(namespace, name)?.origin,
            Kind::ServiceEntry => &self.service_entries.get(namespace, name)?.origin,
            Kind::Service => &self.services.get(namespace, name)?.origin,
            Kind::PeerAuthentication => &self.peer_authentications.get(namespace, name)?.origin,
            Kind::AuthorizationPolicy => &self.authorization_policies.get(namespace, name)?.origin,
            _ => return None,
        };
        Some(origin.file.to_string())
    }

    /// What becomes possible without a policy.
    fn opened_without(&self, key: &ObjectKey) -> Option<&'static str> {
        let policy = self.object(key)?;
        if !matches!(policy, Object::PeerAuthentication(_) | Object::AuthorizationPolicy(_)) {
            return None;
        }
        let mut after = self.clone();
        after.delete(key);
        match policy {
            Object::PeerAuthentication(policy) => {
                let mut workloads = self.workloads_of(&policy.meta.namespace, policy.spec.selector.as_ref());
                let opens = workloads.any(|(namespace, labels)| self.is_stricter(&after, namespace, labels));
                opens.then_some("connections without mutual TLS are accepted now")
            }
            Object::AuthorizationPolicy(policy) => match policy.spec.action {
                Action::Deny => Some("requests that only this policy denied are accepted now"),
                Action::Allow => {
                    let selector = policy.spec.selector.as_ref();
                    let mut workloads = self.workloads_of(&policy.meta.namespace, selector).peekable();
                    workloads.peek()?;
                    let is_open = workloads.any(|(namespace, labels)| {
                        let policies = after.authorization_policies(namespace, labels);
                        policies.iter().all(|policy| policy.spec.action != Action::Allow)
                    });
                    Some(match is_open {
                        true => {
                            "no ALLOW policy is left for them: every request that no other policy denies is accepted now"
                        }
                        false => "requests that only this policy allowed are denied now",
                    })
                }
                Action::Audit | Action::Custom => None,
            },
            _ => None,
        }
    }

    /// Whether a workload requires mutual TLS somewhere where it does not after a change.
    fn is_stricter(&self, after: &Self, namespace: &str, labels: &Labels) -> bool {
        let ports = self.port_modes(namespace, labels).into_iter().chain(after.port_modes(namespace, labels));
        let ports: Vec<u16> = ports.map(|(port, _)| port).collect();
        let is_strict = |mode| mode == MtlsMode::Strict;
        let opens_port = |port: &u16| {
            let mode = |world: &Self| world.peer_mode(namespace, labels, *port);
            is_strict(mode(self)) && !is_strict(mode(after))
        };
        let mode = |world: &Self| world.workload_mode(namespace, labels);
        is_strict(mode(self)) && !is_strict(mode(after)) || ports.iter().any(opens_port)
    }

    /// Namespaces and labels of the workloads that a policy selects: Pods, and what makes Pods.
    fn workloads_of<'a>(
        &'a self,
        namespace: &'a str,
        selector: Option<&'a WorkloadSelector>,
    ) -> impl Iterator<Item = (&'a str, &'a Labels)> {
        let everywhere = namespace == self.mesh().root_namespace;
        let pods = self.pods().map(|pod| (&*pod.meta.namespace, &*pod.meta.labels));
        let templates = self.templates().map(|template| (&*template.meta.namespace, &template.spec.labels));
        pods.chain(templates).filter(move |(of, labels)| {
            (everywhere || *of == namespace)
                && selector.is_none_or(|selector| selects(&selector.match_labels, labels))
        })
    }
}

fn list(mut names: Vec<String>) -> String {
    let more = names.len().saturating_sub(LISTED);
    names.truncate(LISTED);
    let names = names.join(", ");
    if more == 0 { names } else { format!("{names} and {more} more") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{diagnostic::Severity, files::Files};

    const WORKLOAD: &str = "apiVersion: v1\nkind: Pod\nmetadata: {name: web, namespace: shop, labels: {app: web}}\nspec: {containers: [{name: web, image: web}]}\n";

    fn policy(name: &str, spec: &str) -> String {
        format!(
            "---\napiVersion: security.istio.io/v1\nkind: AuthorizationPolicy\nmetadata: {{name: {name}, namespace: shop}}\nspec: {spec}\n"
        )
    }

    /// Returns the effects of the objects of a file when it is added, and when it is removed.
    fn effects(there: &str, file: &str) -> (Vec<Option<String>>, Vec<Option<String>>) {
        let (mut world, mut files) = (World::new(), Files::new());
        for change in files.set(0, "there", &format!("{WORKLOAD}{there}")) {
            change.apply_to(&mut world);
        }
        let effects = |world: &mut World, changes: Vec<Change>| {
            let said = |change: Change| {
                let effect = world.effect(&change);
                change.apply_to(world);
                effect
            };
            changes.into_iter().map(said).collect::<Vec<_>>()
        };
        let came = files.set(0, "file", file);
        let refused = files.diagnostics().into_iter().find(|found| found.severity == Severity::Error);
        assert_eq!(refused, None);
        let came = effects(&mut world, came);
        let gone = files.remove(0, "file");
        (came, effects(&mut world, gone))
    }

    #[test]
    fn a_policy_that_goes_says_what_it_leaves_open() {
        let allow = policy("allow", "{selector: {matchLabels: {app: web}}, action: ALLOW, rules: [{}]}");
        let (came, gone) = effects("", &allow);
        let workloads = "workloads of namespace shop with the labels app: web";
        assert_eq!(came, [Some(workloads.to_owned())]);
        let text = gone[0].as_deref().unwrap();
        assert!(text.starts_with(workloads) && text.contains("no ALLOW policy is left"), "{text}");
        let (_, gone) = effects(&policy("other", "{rules: [{}]}"), &allow);
        assert!(gone[0].as_deref().unwrap().ends_with("only this policy allowed are denied now"), "{gone:?}");
        let (_, gone) = effects("", &policy("deny", "{action: DENY, rules: [{}]}"));
        assert!(gone[0].as_deref().unwrap().contains("denied are accepted now"), "{gone:?}");
    }

    #[test]
    fn strict_mutual_tls_that_goes_is_named_only_where_nothing_else_asks_for_it() {
        let strict = |name: &str, namespace: &str| {
            format!(
                "---\napiVersion: security.istio.io/v1\nkind: PeerAuthentication\nmetadata: {{name: {name}, namespace: {namespace}}}\nspec: {{mtls: {{mode: STRICT}}}}\n"
            )
        };
        let (came, gone) = effects("", &strict("default", "shop"));
        assert_eq!(came, [Some("workloads of namespace shop".to_owned())]);
        assert!(gone[0].as_deref().unwrap().contains("without mutual TLS are accepted now"), "{gone:?}");
        let (_, gone) = effects(&strict("default", "istio-system"), &strict("default", "shop"));
        assert_eq!(gone, [Some("workloads of namespace shop".to_owned())]);
        let of_port = "---\napiVersion: security.istio.io/v1\nkind: PeerAuthentication\nmetadata: {name: web, namespace: shop}\nspec: {selector: {matchLabels: {app: web}}, mtls: {mode: PERMISSIVE}, portLevelMtls: {8080: {mode: STRICT}}}\n";
        let (_, gone) = effects("", of_port);
        assert!(gone[0].as_deref().unwrap().contains("without mutual TLS are accepted now"), "{gone:?}");
        let (_, gone) = effects(&strict("default", "shop"), of_port);
        assert!(!gone[0].as_deref().unwrap().contains("accepted now"), "{gone:?}");
    }

    #[test]
    fn routing_names_its_hosts() {
        let rules = "apiVersion: networking.istio.io/v1\nkind: VirtualService\nmetadata: {name: v, namespace: shop}\nspec: {hosts: [a, b, c.example.com, d], http: [{route: [{destination: {host: web}}]}]}\n---\napiVersion: networking.istio.io/v1\nkind: DestinationRule\nmetadata: {name: r, namespace: shop}\nspec: {host: web}\n---\napiVersion: v1\nkind: Pod\nmetadata: {name: p, namespace: shop}\nspec: {containers: [{name: c, image: i}]}\n";
        let (mut came, _) = effects("", rules);
        came.sort();
        let domain = "shop.svc.cluster.local";
        let expected = [
            None,
            Some(format!("connections to web.{domain}")),
            Some(format!("requests to a.{domain}, b.{domain}, c.example.com and 1 more")),
        ];
        assert_eq!(came, expected);
    }
}
