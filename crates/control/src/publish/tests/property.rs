//! Properties of the publisher, checked on random sequences of changes with objects of all kinds.
//!
//! After each step, each proxy has byte for byte the resources that it would get from a control plane that has just
//! started, whatever the order of its files, and from a compilation for it alone. It was sent what changed, and nothing
//! else. The findings about the configuration are those of a new validation.
//!
//! `SKYSAIL_SEEDS=N` sets the number of sequences, `SKYSAIL_SEEDS=FIRST..END` selects them.

mod objects;

use std::{ops::Range, thread};

use skysail_model::{KeySource, Severity};

use super::*;

/// Number of sequences without `SKYSAIL_SEEDS`.
const SEEDS: u64 = 10;
/// Number of steps of a sequence.
const STEPS: usize = 60;
/// Numbers of files that most changes of a sequence concern: files of one theme, and any files. They are few, so that
/// changes affect each other.
const FOCUS: [usize; 2] = [12, 6];

/// Files with the possible contents of each, in the form that their first lines describe.
const FILES: [&str; 4] = [
    include_str!("property/sidecars.yaml"),
    include_str!("property/gateways.yaml"),
    include_str!("property/policies.yaml"),
    include_str!("property/nodes.yaml"),
];

/// DNS names of endpoints, and possible answers: all addresses, the current one first.
const NAMES: [&str; 3] = ["a.example", "b.example", "c.example"];
const ADDRESSES: [&[&str]; 4] = [&[], &["10.7.0.1"], &["10.7.0.2", "10.7.0.1"], &["10.7.0.3", "fd00::3"]];
/// Possible key sets of each issuer.
const KEY_SETS: [&str; 2] = [r#"{"keys":[]}"#, r#"{"keys":[{"kty":"RSA","e":"AQAB","n":"x"}]}"#];
/// Possible roots of the mesh's authority.
const ROOTS: [&str; 2] = ["one", "two"];

/// Kind of client.
#[derive(Clone, Copy, PartialEq)]
enum ClientKind {
    /// A sidecar.
    Sidecar,
    /// A sidecar with VHDS that receives addresses for DNS names.
    Vhds,
    /// A gRPC client.
    Grpc,
    /// A gateway.
    Gateway,
    /// A gateway that receives addresses for DNS names.
    VhdsGateway,
}

/// A proxy. Those with another name than `p` belong to Pods of the files.
struct Proxy {
    namespace: &'static str,
    pod: &'static str,
    account: &'static str,
    version: &'static str,
    zone: &'static str,
    kind: ClientKind,
}

impl Proxy {
    const fn new(
        namespace: &'static str,
        version: &'static str,
        zone: &'static str,
        kind: ClientKind,
    ) -> Self {
        Self { namespace, pod: "p", account: "default", version, zone, kind }
    }

    const fn of_pod(
        namespace: &'static str,
        pod: &'static str,
        account: &'static str,
        kind: ClientKind,
    ) -> Self {
        Self { namespace, pod, account, version: "v1", zone: "z", kind }
    }

    fn is_gateway(&self) -> bool {
        matches!(self.kind, ClientKind::Gateway | ClientKind::VhdsGateway)
    }

    /// Returns whether the proxy subscribes to all resources. Proxies with equal views have the same subscriptions.
    fn has_all(&self) -> bool {
        self.version == "v1"
    }
}

const PROXIES: [Proxy; 17] = [
    Proxy::new("x", "v1", "z", ClientKind::Sidecar),
    Proxy::new("x", "v2", "z", ClientKind::Vhds),
    Proxy::new("y", "v1", "", ClientKind::Vhds),
    Proxy::new("z", "v1", "", ClientKind::Sidecar),
    Proxy::new("x", "v1", "z", ClientKind::Vhds),
    Proxy::new("x", "v1", "z", ClientKind::Grpc),
    Proxy::new("y", "v2", "", ClientKind::Grpc),
    Proxy::new("y", "v1", "z", ClientKind::Vhds),
    Proxy::new("z", "v1", "z", ClientKind::Vhds),
    Proxy::new("istio-system", "v1", "z", ClientKind::Vhds),
    Proxy::new("x", "v1", "z", ClientKind::Gateway),
    Proxy::new("x", "v1", "z", ClientKind::VhdsGateway),
    Proxy::new("y", "v2", "", ClientKind::VhdsGateway),
    Proxy::of_pod("x", "a-1", "a", ClientKind::Vhds),
    Proxy::of_pod("y", "b-1", "default", ClientKind::Sidecar),
    Proxy::of_pod("y", "web-1", "web", ClientKind::VhdsGateway),
    Proxy::of_pod("y", "near-1", "default", ClientKind::Vhds),
];

/// Nodes that proxies declare: unknown, those of some pods, and one without pods.
const NODES: [&str; 4] = ["", "n", "n2", "n3"];

/// Subscription of proxies that do not subscribe to all resources.
const SUBSCRIPTION: &str = "outbound|80||a.x.svc.cluster.local";

/// Name of a file and its possible contents.
type Variants = (&'static str, Vec<&'static str>);

/// The files, and the ranges of those of one theme.
struct Pool {
    files: Vec<Variants>,
    themes: Vec<Range<usize>>,
}

fn pool() -> Pool {
    let (mut files, mut themes) = (Vec::new(), Vec::new());
    for text in FILES {
        let first = files.len();
        for file in text.split("\n#= ").skip(1) {
            let (name, contents) = file.split_once('\n').unwrap();
            files.push((name, contents.split("\n#|\n").collect()));
        }
        themes.push(first..files.len());
    }
    Pool { files, themes }
}

/// State of the world outside the control plane.
#[derive(Clone, Default)]
struct Inputs {
    /// Content of each file; `None` if it does not exist.
    files: Vec<Option<usize>>,
    answers: [Option<usize>; NAMES.len()],
    key_sets: [Option<usize>; 2],
    roots: Option<usize>,
}

fn sources() -> [KeySource; 2] {
    [KeySource::Uri("https://keys.example/one".into()), KeySource::Issuer("https://issuer.example".into())]
}

/// A control plane and its connected proxies.
struct Mesh<'a> {
    files: &'a [Variants],
    publisher: Arc<Publisher>,
    lookup_names: watch::Receiver<(Arc<LookupNames>, Duration)>,
    key_fetches: watch::Receiver<Arc<KeyFetches>>,
    connected: BTreeMap<usize, (ResourceFeed, Connected)>,
}

impl<'a> Mesh<'a> {
    fn new(files: &'a [Variants]) -> Self {
        let limits =
            ScopeLimits { scopes: 400, scopes_per_identity: 100, views: 400, views_per_identity: 300 };
        let (publisher, lookup_names) = super::publisher(Compiler::default(), limits).with_dns_lookups();
        let (publisher, key_fetches) = publisher.with_key_fetches();
        let publisher = Arc::new(publisher);
        Self { files, publisher, lookup_names, key_fetches, connected: BTreeMap::new() }
    }

    /// Starts a control plane that reads the files at once, in random order.
    fn fresh(files: &'a [Variants], inputs: &Inputs, random: &mut fastrand::Rng) -> Self {
        let mesh = Self::new(files);
        let with_answers = |mesh: &Self| {
            NAMES.iter().zip(inputs.answers).for_each(|(name, answer)| mesh.resolve(name, answer));
            sources().iter().zip(inputs.key_sets).for_each(|(source, keys)| mesh.set_keys(source, keys));
            inputs.roots.into_iter().for_each(|roots| mesh.publisher.set_roots(ROOTS[roots]));
        };
        let is_early = random.bool();
        if is_early {
            with_answers(&mesh);
        }
        let mut order: Vec<(usize, Option<usize>)> =
            inputs.files.iter().copied().enumerate().filter(|(_, variant)| variant.is_some()).collect();
        random.shuffle(&mut order);
        mesh.put(&order);
        if !is_early {
            with_answers(&mesh);
        }
        mesh
    }

    /// Connects a proxy. Returns false if the proxy names a Pod that runs under another account.
    fn connect(&mut self, number: usize) -> bool {
        let proxy = &PROXIES[number];
        let Proxy { namespace, version, zone, kind, .. } = *proxy;
        let is_vhds = matches!(kind, ClientKind::Vhds | ClientKind::VhdsGateway).to_string();
        let role = if proxy.is_gateway() { "router" } else { "sidecar" };
        let pod = if proxy.pod == "p" { format!("p-{number}") } else { proxy.pod.to_owned() };
        let id = format!("{role}~10.2.0.{number}~{pod}.{namespace}~{namespace}.svc.cluster.local");
        let labels = if proxy.is_gateway() {
            serde_json::json!({"istio": "gateway", "app": "gw", "version": version})
        } else {
            serde_json::json!({"app": "a", "version": version})
        };
        let metadata = serde_json::json!({
            "WORKLOAD_NAME": "p", "SKYSAIL_VHDS": is_vhds, "SKYSAIL_RESOLVED": is_vhds, "LABELS": labels,
            "SERVICE_ACCOUNT": proxy.account, "TEAM": if number.is_multiple_of(2) { "one" } else { "two" },
            "GENERATOR": if kind == ClientKind::Grpc { "grpc" } else { "" }, "NODE_NAME": NODES[number % NODES.len()],
        });
        let locality = Locality { region: "r".into(), zone: zone.into(), subzone: String::new() };
        let mut node = ProxyNode::parse(&id, metadata, locality).unwrap();
        node.view.is_authenticated = !number.is_multiple_of(4);
        let client = NewClient {
            node,
            version: String::new(),
            address: String::new(),
            identity: String::new(),
            accounted_to: format!("{namespace}/{}", proxy.account).into(),
            form: Form::Delta,
        };
        let connected = match RUNTIME.block_on(self.publisher.connect(client)) {
            Ok(connected) => connected,
            Err(Refused::AccountMismatch(_)) => return false,
            Err(refused) => panic!("{refused:?}"),
        };
        let interest = &connected.0.interest;
        if proxy.has_all() {
            Kind::ALL.into_iter().for_each(|kind| interest.add_all(kind));
        } else {
            interest.add(Kind::Endpoint, [SUBSCRIPTION]);
        }
        self.connected.insert(number, connected);
        true
    }

    /// Changes files to these contents.
    fn put(&self, changes: &[(usize, Option<usize>)]) {
        let change = |(file, variant): &(usize, Option<usize>)| {
            let (name, variants) = &self.files[*file];
            let text = variant.map(|variant| FileState::Text(variants[variant].to_owned()));
            FileChange { layer: 0, path: (*name).to_owned(), state: text.unwrap_or(FileState::Deleted) }
        };
        self.publisher.apply(changes.iter().map(change).collect());
    }

    /// Applies an answer of DNS: one of [`ADDRESSES`], or none yet.
    fn resolve(&self, name: &str, answer: Option<usize>) {
        let now = answer.map(|answer| {
            let all = ADDRESSES[answer].iter().map(|text| text.parse().unwrap());
            Resolved { addresses: all.clone().collect(), current: all.take(1).collect() }
        });
        self.publisher.resolve(vec![(name.into(), now)]);
    }

    fn set_keys(&self, source: &KeySource, keys: Option<usize>) {
        self.publisher.set_key_sets(vec![(source.clone(), keys.map(|keys| KEY_SETS[keys].into()))]);
    }

    /// Returns whether proxies of a scope have other endpoints on some nodes.
    fn has_nodes(&self) -> bool {
        let state = self.publisher.read();
        let mut published = state.scopes.values().filter_map(|entry| entry.published.as_ref());
        published.any(|published| published.nodes.values().any(|of_node| of_node.layer.is_some()))
    }

    /// Returns the connected proxies whose Pods exist.
    fn with_pods(&self) -> BTreeSet<usize> {
        let state = self.publisher.read();
        let has_pod =
            |proxy: &usize| state.world.pod(PROXIES[*proxy].namespace, PROXIES[*proxy].pod).is_some();
        self.connected.keys().copied().filter(has_pod).collect()
    }

    fn snapshot(&self, proxy: usize) -> Snapshot {
        self.connected[&proxy].0.snapshot.borrow().clone()
    }

    /// Returns the resources of a proxy as compiled for it alone.
    fn compiled(&self, proxy: usize) -> Bodies {
        let state = self.publisher.read();
        let client = &state.clients[&self.connected[&proxy].1.id()];
        let (made, _) = skysail_model::compile_for(&state.world, &client.view, &client.node);
        let all = Kind::ALL.into_iter().flat_map(|kind| made.iter(kind));
        all.map(|resource| ((resource.kind, Arc::clone(&resource.name)), Arc::clone(resource))).collect()
    }

    /// Returns whether a proxy was woken since the last call. `None` if its streams were ended, because its view no
    /// longer matches.
    fn is_woken(&mut self, proxy: usize) -> Option<bool> {
        let snapshot = &mut self.connected.get_mut(&proxy).unwrap().0.snapshot;
        let is_woken = snapshot.has_changed().ok()?;
        snapshot.mark_unchanged();
        Some(is_woken)
    }
}

/// A sequence of changes, and what the proxies had after the last step.
struct Sequence<'a> {
    random: fastrand::Rng,
    files: &'a [Variants],
    /// Files that most changes concern.
    focus: Vec<usize>,
    inputs: Inputs,
    mesh: Mesh<'a>,
    /// Generation and resources of each proxy.
    had: BTreeMap<usize, (u64, Bodies)>,
    /// Number of changes that did not wake a proxy.
    not_woken: usize,
    /// Number of steps after which proxies preferred endpoints of their node.
    with_nodes: usize,
}

impl<'a> Sequence<'a> {
    /// Starts a sequence with most files of the focus and half of the proxies.
    fn new(seed: u64, pool: &'a Pool) -> Self {
        let (files, mut random) = (pool.files.as_slice(), fastrand::Rng::with_seed(seed));
        let theme = pool.themes[random.usize(..pool.themes.len())].clone();
        let mut focus = random.choose_multiple(theme, FOCUS[0]);
        focus.extend(random.choose_multiple(0..files.len(), FOCUS[1]));
        let inputs = Inputs { files: vec![None; files.len()], ..Inputs::default() };
        let mesh = Mesh::new(files);
        let mut sequence =
            Self { random, files, focus, inputs, mesh, had: BTreeMap::new(), not_woken: 0, with_nodes: 0 };
        let changes: Vec<_> = sequence.focus.clone().into_iter().map(|file| sequence.content(file)).collect();
        sequence.put(&changes);
        for proxy in 0..PROXIES.len() {
            if sequence.random.bool() {
                sequence.mesh.connect(proxy);
            }
        }
        sequence
    }

    /// Returns a file with one of its contents, or without one.
    fn content(&mut self, file: usize) -> (usize, Option<usize>) {
        let exists = self.random.u8(..4) > 0;
        (file, exists.then(|| self.random.usize(..self.files[file].1.len())))
    }

    fn put(&mut self, changes: &[(usize, Option<usize>)]) {
        changes.iter().for_each(|(file, variant)| self.inputs.files[*file] = *variant);
        self.mesh.put(changes);
    }

    /// Changes something. Returns its description.
    fn change(&mut self) -> String {
        let random = &mut self.random;
        match random.u8(..16) {
            0..12 => {
                let count = if random.u8(..4) == 0 { random.usize(2..4) } else { 1 };
                let mut changes: Vec<(usize, Option<usize>)> = Vec::new();
                for _ in 0..count {
                    let is_focused = self.random.u8(..8) > 0;
                    let any = self.random.usize(..self.files.len());
                    let focused = self.focus[self.random.usize(..self.focus.len())];
                    let change = self.content(if is_focused { focused } else { any });
                    changes.retain(|(other, _)| *other != change.0);
                    changes.push(change);
                }
                self.put(&changes);
                let names =
                    changes.iter().map(|(file, variant)| format!("{} {variant:?}", self.files[*file].0));
                names.collect::<Vec<_>>().join(", ")
            }
            12..14 => {
                let (name, answer) =
                    (random.usize(..NAMES.len()), random.usize(..=ADDRESSES.len()).checked_sub(1));
                self.inputs.answers[name] = answer;
                self.mesh.resolve(NAMES[name], answer);
                format!("answer {answer:?} for {}", NAMES[name])
            }
            14 => {
                let (source, keys) = (random.usize(..2), random.usize(..=KEY_SETS.len()).checked_sub(1));
                self.inputs.key_sets[source] = keys;
                self.mesh.set_keys(&sources()[source], keys);
                format!("key set {keys:?} of {}", sources()[source])
            }
            _ => {
                let roots = random.usize(..ROOTS.len());
                self.inputs.roots = Some(roots);
                self.mesh.publisher.set_roots(ROOTS[roots]);
                format!("roots {roots}")
            }
        }
    }

    /// Changes something, and sometimes connects or disconnects a proxy. Then checks all proxies.
    fn step(&mut self) -> Result<(), String> {
        let grouping = self.mesh.publisher.read().grouping.clone();
        let before = self.mesh.with_pods();
        let change = self.change();
        // A deleted Pod changes nothing for its proxy, which ends with it. Here it starts again.
        for proxy in before.difference(&self.mesh.with_pods()) {
            self.mesh.connected.remove(proxy);
            self.had.remove(proxy);
            self.mesh.connect(*proxy);
        }
        let regrouped = self.mesh.publisher.read().grouping != grouping;
        let at = |what: String| format!("{change}: {what}");
        if self.random.u8(..3) == 0 {
            let proxy = self.random.usize(..PROXIES.len());
            if self.mesh.connected.remove(&proxy).is_none() {
                self.mesh.connect(proxy);
            }
            self.had.remove(&proxy);
        }
        let world = self.mesh.publisher.read().world.clone();
        if lock(&self.mesh.publisher.validator).validate(&world) != world.validate() {
            return Err(at("findings differ from a new validation".to_owned()));
        }
        let mut fresh = Mesh::fresh(self.files, &self.inputs, &mut self.random);
        if *self.mesh.lookup_names.borrow() != *fresh.lookup_names.borrow() {
            return Err(at("names to look up differ from a fresh start".to_owned()));
        }
        if *self.mesh.key_fetches.borrow() != *fresh.key_fetches.borrow() {
            return Err(at("key sets to fetch differ from a fresh start".to_owned()));
        }
        self.with_nodes += usize::from(self.mesh.has_nodes());
        let proxies: Vec<usize> = self.mesh.connected.keys().copied().collect();
        for proxy in proxies {
            self.check(proxy, &mut fresh, regrouped).map_err(|problem| {
                at(format!("proxy {proxy} {problem}\nfiles: {}", self.present().join(", ")))
            })?;
        }
        Ok(())
    }

    /// Returns the files that exist, with the numbers of their contents.
    fn present(&self) -> Vec<String> {
        let files = self.files.iter().zip(&self.inputs.files);
        files.filter_map(|((name, _), variant)| Some(format!("{name} {}", (*variant)?))).collect()
    }

    fn check(&mut self, proxy: usize, fresh: &mut Mesh<'_>, regrouped: bool) -> Result<(), String> {
        let woken = self.mesh.is_woken(proxy);
        if woken.is_none() {
            self.mesh.connected.remove(&proxy);
            self.had.remove(&proxy);
            self.mesh.connect(proxy);
        }
        let is_known = fresh.connect(proxy);
        if !is_known || !self.mesh.connected.contains_key(&proxy) {
            let agree = is_known == self.mesh.connected.contains_key(&proxy);
            return if agree {
                Ok(())
            } else {
                Err("is admitted after the change or by a fresh start only".into())
            };
        }
        let snapshot = self.mesh.snapshot(proxy);
        let now = bodies(&snapshot);
        let fail = |what: &str, names: &[String]| match names {
            [] => Ok(()),
            names => Err(format!("{what}: {names:?}")),
        };
        fail("differs from a fresh start", &differences(&now, &bodies(&fresh.snapshot(proxy))))?;
        fail("differs from a compilation for it alone", &differences(&now, &self.mesh.compiled(proxy)))?;
        if let Some((generation, before)) = self.had.get(&proxy) {
            let sent = sent(&snapshot, *generation);
            let differ: BTreeSet<_> = differences(before, &now).into_iter().collect();
            fail("was not sent", &differ.difference(&sent).cloned().collect::<Vec<_>>())?;
            if !regrouped {
                fail("was sent without a change", &sent.difference(&differ).cloned().collect::<Vec<_>>())?;
            }
            let subscribed =
                |name: &String| PROXIES[proxy].has_all() || *name == format!("eds {SUBSCRIPTION}");
            let concerned: Vec<String> = differ.iter().filter(|name| subscribed(name)).cloned().collect();
            if woken == Some(false) {
                fail("was not woken for", &concerned)?;
                self.not_woken += usize::from(!differ.is_empty());
            }
        }
        self.had.insert(proxy, (snapshot.generation(), now));
        Ok(())
    }
}

fn seeds() -> Range<u64> {
    let Ok(text) = std::env::var("SKYSAIL_SEEDS") else { return 0..SEEDS };
    match text.split_once("..") {
        Some((first, end)) => first.parse().unwrap()..end.parse().unwrap(),
        None => 0..text.parse().unwrap(),
    }
}

#[test]
fn each_proxy_has_the_resources_of_a_fresh_start_and_receives_no_other_changes() {
    let (pool, seeds) = (pool(), seeds());
    // A few sequences may not reach everything.
    let reach_all = seeds.end - seeds.start >= SEEDS;
    let seeds = Mutex::new(seeds);
    let (failures, not_woken, with_nodes) = (Mutex::new(Vec::new()), Mutex::new(0), Mutex::new(0));
    let run = || {
        while let Some(seed) = { lock(&seeds).next() } {
            let mut sequence = Sequence::new(seed, &pool);
            let failed = (0..STEPS).find_map(|step| Some((step, sequence.step().err()?)));
            if let Some((step, problem)) = failed {
                lock(&failures).push(format!("seed {seed}, step {step}: {problem}"));
            }
            *lock(&not_woken) += sequence.not_woken;
            *lock(&with_nodes) += sequence.with_nodes;
        }
    };
    let threads = thread::available_parallelism().map_or(1, usize::from);
    thread::scope(|scope| (0..threads).for_each(|_| _ = scope.spawn(run)));
    let failures = failures.into_inner().unwrap();
    assert!(failures.is_empty(), "{} sequences fail:\n{}", failures.len(), failures.join("\n\n"));
    assert!(
        !reach_all || not_woken.into_inner().unwrap() > 0,
        "every change wakes every proxy, whatever its subscriptions"
    );
    assert!(!reach_all || with_nodes.into_inner().unwrap() > 0, "no proxy prefers endpoints of its node");
}

#[test]
fn the_files_are_valid_and_have_all_kinds() {
    let mut kinds = BTreeSet::new();
    for (name, variants) in pool().files {
        for variant in variants {
            let parsed = parse(variant, name);
            let errors = parsed.diagnostics.iter().filter(|said| said.severity == Severity::Error);
            assert_eq!(errors.map(ToString::to_string).collect::<Vec<_>>(), [""; 0]);
            assert!(!parsed.objects.is_empty(), "{name}");
            kinds.extend(parsed.objects.iter().map(|(object, _)| object.kind()));
        }
    }
    let missing: Vec<_> = skysail_model::Kind::ALL.iter().filter(|kind| !kinds.contains(kind)).collect();
    assert!(missing.is_empty(), "{missing:?}");
}
