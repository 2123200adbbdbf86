//! The status of an object has all proxies whose resources depend on it.

use skysail_model::parse;
use skysail_xds::server::Event;

use super::*;

/// Files whose objects have effects that the status leaves out: on the names of services, on the clients of workloads, or
/// that another object or a resource is hidden from a proxy.
const INDIRECT: [&str; 6] = ["alias", "authentication", "mesh", "sidecar", "sidecar-all", "rule-of-namespace"];

impl Mesh {
    /// Acts as all proxies: they subscribe to everything and accept what they are sent.
    fn accept_all(&self) {
        for (number, (feed, connected)) in &self.connected {
            let generation = feed.snapshot.borrow().generation();
            for kind in Kind::ALL {
                connected.report(Event::Requested { kind, generation: None });
                connected.report(Event::Subscribed { kind, all: true, names: &Arc::default() });
                let (nonce, resources, removed, bytes) = (*number as u64 + 1, 0, 0, 0);
                connected.report(Event::Sent { kind, nonce, resources, removed, bytes, generation });
                connected.report(Event::Acked { kind, nonce });
            }
        }
    }
}

#[test]
fn the_status_of_an_object_has_all_proxies_whose_resources_depend_on_it() {
    let mut checked = BTreeMap::<String, usize>::new();
    for seed in 0..6 {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut mesh = Mesh::new();
        let mut files = [None; FILES.len()];
        for (file, (_, variants)) in FILES.iter().enumerate() {
            files[file] = random.usize(..=variants.len()).checked_sub(1);
            mesh.put(file, files[file]);
        }
        (0..PROXIES.len()).for_each(|proxy| mesh.connect(proxy));
        for (file, (name, variants)) in FILES.iter().enumerate() {
            let Some(variant) = files[file].filter(|_| !INDIRECT.contains(name)) else { continue };
            let objects = parse(variants[variant], name).objects;
            let [(object, _)] = &objects[..] else { continue };
            let key = object.key();
            let with: Vec<Bodies> = (0..PROXIES.len()).map(|proxy| bodies(&mesh.snapshot(proxy))).collect();
            mesh.put(file, None);
            let without = |proxy: usize| bodies(&mesh.snapshot(proxy));
            let changes = (0..PROXIES.len()).map(|proxy| differences(&without(proxy), &with[proxy]));
            let changes: Vec<Vec<String>> = changes.collect();
            let differ = (0..PROXIES.len()).filter(|proxy| !changes[*proxy].is_empty());
            let differ: BTreeSet<String> = differ.map(|proxy| format!("p-{proxy}")).collect();
            mesh.put(file, Some(variant));
            mesh.accept_all();
            let status = mesh.publisher.object(key.kind.as_str(), &key.namespace, &key.name);
            let Some(status) = status else { continue };
            let status = serde_json::to_value(&status).unwrap();
            let proxies = status["deliveries"].as_array().unwrap().iter();
            let pod = |id: &str| id.split(['~', '.']).find(|part| part.starts_with("p-")).unwrap().to_owned();
            let holders: BTreeSet<String> = proxies.map(|one| pod(one["proxy"].as_str().unwrap())).collect();
            let missing: Vec<_> = differ.difference(&holders).collect();
            assert!(
                missing.is_empty(),
                "seed {seed}: {key} of {name} ({variant}): {missing:?} of {changes:?}: {status}"
            );
            let expected = if holders.is_empty() { "unused" } else { "in_effect" };
            assert_eq!(status["state"], expected, "seed {seed}: {key}: {status}");
            *checked.entry(key.kind.to_string()).or_default() += differ.len();
        }
    }
    for kind in ["Service", "VirtualService", "DestinationRule", "ServiceEntry", "AuthorizationPolicy"] {
        assert!(checked.get(kind).is_some_and(|count| *count > 0), "no {kind} was effective: {checked:?}");
    }
}
