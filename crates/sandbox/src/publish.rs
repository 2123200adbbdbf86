//! Published ports: ports of the host and the pods behind them.
//!
//! A process outside the mesh binds the listeners on the host, and then enters the mesh's network namespace. It reads
//! the pods of each target from a file that the mesh updates, so that published ports outlive pods.

use std::{collections::BTreeMap, fmt, fs, net::SocketAddr, path::Path};

use serde::{Deserialize, Serialize};

use crate::{
    error::Error,
    objects::{Key, Objects, Service, ServicePort},
    plan::Pod,
    survey::{Survey, list},
};

/// File with the ready pods of each target, in the mesh's folder.
pub(crate) const FILE: &str = "published.json";

/// Target of a published port.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Target {
    namespace: String,
    name: String,
    /// Port of the Service, or of the workload's pods.
    port: u16,
    is_service: bool,
    /// URL scheme, if the port's declared protocol is HTTP or unknown.
    scheme: Option<String>,
}

/// Port that a Service publishes by its type, as a cluster would.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PublishedServicePort {
    /// Target.
    pub target: Target,
    /// `LoadBalancer` or `NodePort`.
    pub kind: &'static str,
    /// Port of the host that the Service asks for.
    pub port: Option<u16>,
    /// True if another port of the host may be used instead.
    pub is_flexible: bool,
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}:{}", self.namespace, self.name, self.port)
    }
}

impl Target {
    /// Returns the target's URL at an address of the host, or the address if it does not serve HTTP.
    pub fn at(&self, address: SocketAddr) -> String {
        match &self.scheme {
            Some(scheme) => format!("{scheme}://{address}"),
            None => address.to_string(),
        }
    }

    fn of_service((namespace, name): &Key, port: &ServicePort) -> Self {
        let (namespace, name) = (namespace.clone(), name.clone());
        Self { namespace, name, port: port.spec.port, is_service: true, scheme: port.scheme() }
    }
}

impl Survey {
    /// Returns the target of `--publish`: a port of a Service, or else of a workload.
    ///
    /// # Errors
    /// When no object has this name, or objects of several namespaces have it. Also when the Service has no selector,
    /// when its port is not TCP, or when it has no such port and there is no workload of this name.
    pub fn target(&self, name: &str, port: u16) -> Result<Target, Error> {
        let objects = self.objects();
        let (namespace, short) = match name.split_once('/') {
            Some((namespace, name)) => (Some(namespace), name),
            None => (None, name),
        };
        let is_it = |space: &String, name: &String| {
            name == short && namespace.is_none_or(|namespace| namespace == space)
        };
        let services: Vec<_> =
            objects.services.iter().filter(|((space, name), _)| is_it(space, name)).collect();
        let workloads: Vec<_> =
            objects.workloads.values().filter(|one| is_it(&one.namespace, &one.name)).collect();
        let spaces = services.iter().map(|((space, _), _)| space);
        let mut spaces: Vec<_> = spaces.chain(workloads.iter().map(|one| &one.namespace)).collect();
        spaces.sort();
        spaces.dedup();
        if spaces.len() > 1 {
            return Err(Error::Refused(format!("{name} is in several namespaces: write NAMESPACE/{name}")));
        }
        if let Some((key, service)) = services.first() {
            if let Some(found) = service.ports.iter().find(|one| one.spec.port == port) {
                return match service.has_pods() && found.is_tcp() {
                    true => Ok(Target::of_service(key, found)),
                    false => Err(Error::Refused(format!(
                        "Service {}/{}, port {port}: only TCP ports of Services with a selector can be published",
                        key.0, key.1
                    ))),
                };
            }
            if workloads.is_empty() {
                let ports = list(service.ports.iter().map(|port| port.spec.port));
                let what = format!("Service {}/{} has no port {port}; it has {ports}", key.0, key.1);
                return Err(Error::Refused(what));
            }
        }
        let Some(workload) = workloads.first() else {
            let services = objects.services.keys().map(|(space, name)| format!("{space}/{name}"));
            let workloads = objects.workloads.values().map(|one| format!("{}/{}", one.namespace, one.name));
            let mut known: Vec<_> = services.chain(workloads).collect();
            known.sort();
            known.dedup();
            let what = format!("there is no Service or workload {name}; there are {}", list(known));
            return Err(Error::Refused(what));
        };
        let (namespace, name) = (workload.namespace.clone(), workload.name.clone());
        Ok(Target { namespace, name, port, is_service: false, scheme: Some("http".to_owned()) })
    }

    /// Returns the ports that Services of type LoadBalancer or NodePort publish.
    pub fn opened(&self) -> Vec<PublishedServicePort> {
        opened(self.objects()).collect()
    }
}

fn opened(objects: &Objects) -> impl Iterator<Item = PublishedServicePort> {
    objects.services.iter().filter(|(_, service)| service.has_pods()).flat_map(|(key, service)| {
        let ports = service.ports.iter().filter(|port| port.is_tcp());
        ports.filter_map(|port| {
            let (kind, wanted) = match service.kind.as_deref()? {
                "LoadBalancer" => ("LoadBalancer", Some(port.spec.port)),
                "NodePort" => ("NodePort", port.node_port),
                _ => return None,
            };
            let target = Target::of_service(key, port);
            Some(PublishedServicePort {
                target,
                kind,
                port: wanted,
                is_flexible: kind == "LoadBalancer" || wanted.is_none(),
            })
        })
    })
}

/// Returns notes about ports of Services that are not published: those that cannot be forwarded, and those that were
/// added after the start.
pub(crate) fn notes(published: &[Target], objects: &Objects) -> Vec<String> {
    // The scheme may have changed.
    let is_published =
        |target: &Target| published.iter().any(|one| one.is_service && one.to_string() == target.to_string());
    let late = opened(objects).filter(|one| !is_published(&one.target)).map(|one| {
        let PublishedServicePort { target, kind, .. } = one;
        format!(
            "Service {target} ({kind}) was added after the start and is not published; restart `skysail up` to publish it"
        )
    });
    let other = objects.services.iter().filter(|(_, service)| {
        matches!(service.kind.as_deref(), Some("LoadBalancer" | "NodePort"))
            && !(service.has_pods() && service.ports.iter().all(ServicePort::is_tcp))
    });
    let other = other.map(|((namespace, name), _)| {
        format!("Service {namespace}/{name}: only TCP ports of Services with a selector are published")
    });
    late.chain(other).collect()
}

/// Returns the ready pods of each target.
pub(crate) fn backends(
    targets: &[Target],
    services: &BTreeMap<Key, Service>,
    pods: &[(&Pod, bool)],
) -> Vec<Vec<SocketAddr>> {
    let ready = |target: &Target| {
        let Target { namespace, name, port, is_service, .. } = target;
        let service = services.get(&(namespace.clone(), name.clone()));
        let declared = service.and_then(|service| service.ports.iter().find(|one| one.spec.port == *port));
        let port_of = |pod: &Pod| match is_service {
            true if pod.selected_by(namespace, service?) => pod.target(declared?),
            true => None,
            false => ((&pod.namespace, &pod.workload) == (namespace, name)).then_some(*port),
        };
        let ready = pods.iter().filter(|(_, ready)| *ready);
        ready.filter_map(|(pod, _)| Some(SocketAddr::from((pod.address, port_of(pod)?)))).collect()
    };
    targets.iter().map(ready).collect()
}

/// Returns the ready pods of the target with this number, in the mesh of this folder; none before the mesh runs.
pub fn ready(folder: &Path, target: usize) -> Vec<SocketAddr> {
    let text = fs::read(folder.join(FILE)).unwrap_or_default();
    let all: Vec<Vec<SocketAddr>> = serde_json::from_slice(&text).unwrap_or_default();
    all.into_iter().nth(target).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHOP: &str = "
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
spec:
  type: LoadBalancer
  selector: {app: web}
  ports: [{name: http, port: 80, targetPort: web}, {name: tcp-db, port: 5432}]
---
apiVersion: v1
kind: Service
metadata: {name: names, namespace: shop}
spec: {type: NodePort, selector: {app: web}, ports: [{name: dns, port: 53, protocol: UDP}, {name: web, port: 54, nodePort: 30054}]}
---
apiVersion: v1
kind: Service
metadata: {name: far, namespace: shop}
spec: {type: LoadBalancer, ports: [{port: 80}]}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: web, namespace: shop}
spec:
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec: {containers: [{name: web, image: acme/web, ports: [{name: web, containerPort: 8080}]}]}
---
apiVersion: v1
kind: Pod
metadata: {name: twin, namespace: shop}
spec: {containers: [{name: web, image: acme/web}]}
---
apiVersion: v1
kind: Pod
metadata: {name: twin, namespace: other}
spec: {containers: [{name: web, image: acme/web}]}
";

    fn survey() -> Survey {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("a.yaml"), SHOP).unwrap();
        Survey::read(&[folder.path().to_owned()], None).unwrap()
    }

    #[test]
    fn names_stand_for_services_or_else_for_workloads() {
        let survey = survey();
        let address = SocketAddr::from(([127, 0, 0, 1], 8080));
        let shown = |name: &str, port: u16| {
            let target = survey.target(name, port).map_err(|error| error.to_string())?;
            Ok::<_, String>(format!("{} -> {target} {}", target.at(address), target.is_service))
        };
        assert_eq!(shown("web", 80).unwrap(), "http://127.0.0.1:8080 -> shop/web:80 true");
        assert_eq!(shown("shop/web", 5432).unwrap(), "127.0.0.1:8080 -> shop/web:5432 true");
        assert_eq!(shown("web", 8080).unwrap(), "http://127.0.0.1:8080 -> shop/web:8080 false");
        for (name, port, problem) in [
            (
                "wbe",
                80,
                "there is no Service or workload wbe; there are other/twin, shop/far, shop/names, shop/twin, shop/web",
            ),
            ("twin", 80, "write NAMESPACE/twin"),
            ("names", 80, "has no port 80; it has 53, 54"),
            ("names", 53, "only TCP ports"),
            ("far", 80, "with a selector"),
        ] {
            let error = shown(name, port).unwrap_err();
            assert!(error.contains(problem), "{error}");
        }
    }

    #[test]
    fn services_publish_ports_by_their_type() {
        let survey = survey();
        let opened = survey.opened();
        let shown: Vec<_> =
            opened.iter().map(|one| (one.target.to_string(), one.kind, one.port, one.is_flexible)).collect();
        assert_eq!(
            shown,
            [
                ("shop/names:54".to_owned(), "NodePort", Some(30054), false),
                ("shop/web:80".to_owned(), "LoadBalancer", Some(80), true),
                ("shop/web:5432".to_owned(), "LoadBalancer", Some(5432), true),
            ]
        );
        let targets: Vec<_> = opened.into_iter().map(|one| one.target).collect();
        let notes = notes(&targets[1..], survey.objects());
        assert_eq!(
            notes,
            [
                "Service shop/names:54 (NodePort) was added after the start and is not published; restart `skysail up` to publish it",
                "Service shop/far: only TCP ports of Services with a selector are published",
                "Service shop/names: only TCP ports of Services with a selector are published",
            ]
        );
    }

    #[test]
    fn connections_go_to_ready_pods_on_the_target_port() {
        let survey = survey();
        let objects = survey.objects();
        let targets: Vec<_> = [("web", 80), ("web", 9), ("shop/twin", 7)]
            .map(|(name, port)| survey.target(name, port).unwrap())
            .into();
        let pod = |workload: &str, last: u8| {
            let workload =
                objects.workloads.values().find(|one| one.namespace == "shop" && one.name == workload);
            Pod::new(workload.unwrap(), format!("pod-{last}"), [10, 244, 0, last].into(), &objects.namespaces)
        };
        let (one, two, twin) = (pod("web", 2), pod("web", 3), pod("twin", 4));
        let pods = [(&one, true), (&two, false), (&twin, true)];
        let now = backends(&targets, &objects.services, &pods);
        let address = |last, port| SocketAddr::from(([10, 244, 0, last], port));
        assert_eq!(now, [vec![address(2, 8080)], vec![address(2, 9)], vec![address(4, 7)]]);
        let folder = tempfile::tempdir().unwrap();
        assert!(ready(folder.path(), 0).is_empty());
        fs::write(folder.path().join(FILE), serde_json::to_string(&now).unwrap()).unwrap();
        assert_eq!(ready(folder.path(), 2), [address(4, 7)]);
    }
}
