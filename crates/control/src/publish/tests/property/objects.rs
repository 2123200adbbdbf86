//! The status of an object has all proxies whose resources depend on it.

use skysail_xds::server::Event;

use super::*;

/// Files whose objects have effects that the status leaves out: on the names of services, on the clients of workloads, or
/// that another object or a resource is hidden from a proxy.
const INDIRECT: [&str; 8] = [
    "alias",
    "authentication",
    "mesh",
    "mesh-with-providers",
    "mesh-for-ingresses",
    "sidecar",
    "sidecar-all",
    "rule-of-namespace",
];

impl Mesh<'_> {
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

/// Returns the proxies of a mesh with their resources.
fn proxies(mesh: &Mesh<'_>) -> BTreeMap<usize, Bodies> {
    mesh.connected.keys().map(|proxy| (*proxy, bodies(&mesh.snapshot(*proxy)))).collect()
}

#[test]
fn the_status_of_an_object_has_all_proxies_whose_resources_depend_on_it() {
    let (pool, mut checked, mut failures) = (pool(), BTreeMap::<String, usize>::new(), Vec::new());
    for seed in seeds() {
        let mut sequence = Sequence::new(seed, &pool);
        (0..PROXIES.len()).for_each(|proxy| _ = sequence.mesh.connect(proxy));
        for file in sequence.focus.clone() {
            let (name, variants) = &pool.files[file];
            let Some(variant) = sequence.inputs.files[file].filter(|_| !INDIRECT.contains(name)) else {
                continue;
            };
            let objects = parse(variants[variant], name).objects;
            let [(object, _)] = &objects[..] else { continue };
            let (key, mesh) = (object.key(), &sequence.mesh);
            let with = proxies(mesh);
            mesh.put(&[(file, None)]);
            let without = proxies(mesh);
            let changes = with.iter().map(|(proxy, with)| (*proxy, differences(&without[proxy], with)));
            let changes: BTreeMap<usize, Vec<String>> =
                changes.filter(|(_, names)| !names.is_empty()).collect();
            mesh.put(&[(file, Some(variant))]);
            mesh.accept_all();
            let status = mesh.publisher.object(key.kind.as_str(), &key.namespace, &key.name);
            let Some(status) = status else { continue };
            let status = serde_json::to_value(&status).unwrap();
            let addresses: BTreeSet<&str> = status["deliveries"]
                .as_array()
                .unwrap()
                .iter()
                .map(|one| one["proxy"].as_str().unwrap())
                .collect();
            let is_holder =
                |proxy: &usize| addresses.iter().any(|id| id.contains(&format!("~10.2.0.{proxy}~")));
            let missing: Vec<_> = changes.iter().filter(|(proxy, _)| !is_holder(proxy)).collect();
            if !missing.is_empty() {
                failures.push(format!(
                    "seed {seed}: {key} of {name} ({variant}): {missing:?}: {}",
                    status["resources"]
                ));
            }
            let expected = if addresses.is_empty() { "unused" } else { "in_effect" };
            assert_eq!(status["state"], expected, "seed {seed}: {key}: {status}");
            *checked.entry(key.kind.to_string()).or_default() += changes.len();
        }
    }
    for kind in
        ["Service", "VirtualService", "DestinationRule", "ServiceEntry", "AuthorizationPolicy", "Gateway"]
    {
        assert!(checked.get(kind).is_some_and(|count| *count > 0), "no {kind} was effective: {checked:?}");
    }
}
