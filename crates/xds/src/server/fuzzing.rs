//! A stream from both ends: whatever a client asks, and whatever changes meanwhile, it has in the end what it asked for.
//!
//! A script of bytes says what happens. The client keeps to the protocol's description, but for what it is told to send byte by
//! byte; what it has by then is not looked at any more.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::Arc,
};

use prost::Message as _;
use skysail_proto::envoy::pb::envoy::config::cluster::v3::Cluster;

use super::{
    IntoAsk,
    nonces::{Nonce, Nonces},
    state::{Session, SubscriptionRequest},
};
use crate::{
    grpc::PartialMessage,
    interest::{Change, Interest},
    kind::Kind,
    layer::{Layer, Snapshot},
    resource::Resource,
    wire::{DeltaRequest, DeltaResponse, Form, SotwRequest, SotwResponse, name_of},
};

/// What there is of each kind, if all of it is there.
const NAMES: [&str; 4] = ["a", "b", "c", "d"];
/// The same of virtual hosts: two by two of one route configuration.
const HOSTS: [&str; 4] = ["a/1", "a/2", "b/1", "b/2"];
/// What they may be found by.
const ALIASES: [&str; 2] = ["a/x", "b/x"];
/// Virtual hosts go one by one in the delta form only.
const KINDS: [Kind; 5] = [Kind::Cluster, Kind::Endpoint, Kind::Listener, Kind::Route, Kind::VirtualHost];
/// The longest request of a script, in bytes.
const MAX_REQUEST: usize = 1 << 10;

/// Plays a script.
///
/// # Panics
/// If a client that keeps to the protocol lacks something in the end, or has what it should not.
pub fn stream(script: &[u8]) {
    let [form, script @ ..] = script else { return };
    let form = self::form(*form);
    let kinds = kinds(form);
    let mut play = Play::new(form);
    let mut rest = script;
    while let [what, argument, after @ ..] = rest {
        rest = after;
        let kind = kinds[usize::from(what >> 4) % kinds.len()];
        let name = name(kind, *argument);
        match what & 15 {
            0..=2 => {
                play.set(kind, name, argument >> 2);
                continue;
            }
            3 | 4 => {
                play.remove(kind, name);
                continue;
            }
            5 if kind == Kind::VirtualHost => {
                let alias = ALIASES[usize::from(*argument) % ALIASES.len()];
                play.wants(kind, |names| {
                    if argument & 8 == 0 { names.insert(alias.to_owned()) } else { names.remove(alias) }
                });
            }
            5..=7 => play.wants(kind, |names| names.insert(name.to_owned())),
            8 => play.wants(kind, |names| names.remove(name)),
            9 => play.wants(kind, |names| names.insert("*".to_owned())),
            10 => play.wants(kind, |names| names.remove("*")),
            11 if kind == Kind::VirtualHost => play.wants(kind, |names| names.insert("a".to_owned())),
            11 => play.wants(kind, |_| true),
            12 | 13 => _ = play.take(argument % 4 != 0),
            14 => play.reconnect(),
            _ => {
                let (bytes, after) = rest.split_at(rest.len().min(usize::from(*argument)));
                rest = after;
                play.say(bytes);
            }
        }
        play.deliver();
    }
    play.finish();
}

fn form(first: u8) -> Form {
    if first.is_multiple_of(2) { Form::Delta } else { Form::Sotw }
}

fn kinds(form: Form) -> &'static [Kind] {
    if form == Form::Delta { &KINDS } else { &KINDS[..4] }
}

fn name(kind: Kind, argument: u8) -> &'static str {
    let names = if kind == Kind::VirtualHost { HOSTS } else { NAMES };
    names[usize::from(argument) % names.len()]
}

/// A stream's two ends and what there is.
struct Play {
    form: Form,
    world: Layer,
    generation: u64,
    session: Session,
    nonces: Nonces,
    interest: Arc<Interest>,
    kinds: BTreeMap<Kind, Side>,
    /// What the server said and the client has not read, as it goes over the wire.
    under_way: VecDeque<(Kind, Vec<u8>)>,
    /// The client has said what no client would.
    wild: bool,
}

/// What the client knows of a kind.
#[derive(Default)]
struct Side {
    /// What it asks for.
    names: BTreeSet<String>,
    /// Names and versions (delta) or bodies.
    have: BTreeMap<String, Vec<u8>>,
    /// That of the last response.
    nonce: String,
    /// State of the world: no names were given on this stream, which means all of some kinds.
    nameless: bool,
}

impl Side {
    fn watches(&self, kind: Kind, name: &str) -> bool {
        self.names.contains("*")
            || (self.nameless && kind.is_wildcard())
            || self.names.contains(name)
            || kind.family(name).is_some_and(|family| self.names.contains(family))
    }
}

impl Play {
    fn new(form: Form) -> Self {
        let interest = Arc::<Interest>::default();
        Self {
            form,
            world: Layer::default(),
            generation: 1,
            session: Session::new(form, Arc::clone(&interest), Arc::default()),
            nonces: Nonces::new(),
            interest,
            kinds: BTreeMap::new(),
            under_way: VecDeque::new(),
            wild: false,
        }
    }

    fn now(&self) -> Snapshot {
        Snapshot { shared: Arc::new(self.world.clone()), ..Snapshot::default() }
    }

    fn set(&mut self, kind: Kind, name: &str, value: u8) {
        self.generation += 1;
        let message = Cluster { name: name.into(), alt_stat_name: value.to_string(), ..Cluster::default() };
        let aliases = kind.family(name).filter(|_| value % 2 == 1).map(|family| format!("{family}/x"));
        let body = message.encode_to_vec().into();
        self.world.set(self.generation, Resource::with_aliases(kind, name, body, aliases.as_deref()));
        self.wake();
    }

    /// Whom a change does not concern does not look at it.
    fn wake(&mut self) {
        if self.interest.concerns(&Change::since(&self.world, self.generation - 1)) {
            self.deliver();
        }
    }

    fn remove(&mut self, kind: Kind, name: &str) {
        self.generation += 1;
        self.world.remove(self.generation, kind, name);
        self.wake();
    }

    fn ask(&mut self, ask: SubscriptionRequest) {
        let now = self.now();
        self.session.request(ask, &now, &mut |_| {});
    }

    /// The client asks for something else of a kind, or for the same once more.
    fn wants(&mut self, kind: Kind, change: impl FnOnce(&mut BTreeSet<String>) -> bool) {
        let first = !self.kinds.contains_key(&kind);
        let side = self.kinds.entry(kind).or_default();
        let before = side.names.clone();
        change(&mut side.names);
        side.nameless = self.form == Form::Sotw && (first || side.nameless) && side.names.is_empty();
        // What it asks for no more it forgets.
        let mut have = std::mem::take(&mut side.have);
        have.retain(|name, _| side.watches(kind, name));
        side.have = have;
        let given = |names: &mut dyn Iterator<Item = &String>| names.cloned().collect();
        let ask = match self.form {
            Form::Sotw => SubscriptionRequest {
                kind,
                nonce: self.nonces.read(&side.nonce),
                names: given(&mut side.names.iter()),
                ..SubscriptionRequest::default()
            },
            Form::Delta => SubscriptionRequest {
                kind,
                names: given(&mut side.names.difference(&before)),
                unsubscribe: given(&mut before.difference(&side.names)),
                ..SubscriptionRequest::default()
            },
        };
        // The older way to ask for everything.
        if self.form == Form::Delta && first && side.names.is_empty() && kind.is_wildcard() {
            side.names.insert("*".to_owned());
        }
        // A first request of delta without names means all, even if one was taken back.
        let says_nothing = self.form == Form::Delta && ask.names.is_empty() && ask.unsubscribe.is_empty();
        if first || !says_nothing {
            self.ask(ask);
        }
    }

    /// What the server has to say goes on its way.
    fn deliver(&mut self) {
        let now = self.now();
        let Ok(pushes) = self.session.pushes(&now) else { return self.reconnect() };
        for push in pushes {
            let waits = self.under_way.iter().any(|(kind, _)| *kind == push.kind);
            assert!(!waits, "two responses of {} are under way", push.kind);
            let (kind, nonce) = (push.kind, self.nonces.text(push.number));
            let pieces = push.encode(nonce);
            let length = pieces.message_len();
            let bytes = pieces.collect::<Vec<_>>().concat();
            assert_eq!(bytes.len(), 5 + length);
            self.under_way.push_back((kind, bytes[5..].to_vec()));
        }
    }

    /// The client reads a response, and says so. False if there is none.
    fn take(&mut self, good: bool) -> bool {
        let Some((kind, bytes)) = self.under_way.pop_front() else { return false };
        let side = self.kinds.entry(kind).or_default();
        let mut confirmed = Vec::new();
        match self.form {
            Form::Delta => {
                let response = DeltaResponse::decode(&*bytes);
                assert!(response.is_ok(), "{response:?}");
                let response = response.unwrap_or_default();
                side.nonce = response.nonce;
                let both =
                    response.resources.iter().find(|one| response.removed_resources.contains(&one.name));
                assert!(both.is_none(), "{kind} {both:?} comes and goes");
                for resource in response.resources {
                    // What comes for an alias is asked for by its name from then on.
                    let family = kind.family(&resource.name);
                    let given = family.is_some_and(|family| side.names.contains(&format!("{family}/x")));
                    if given && !side.watches(kind, &resource.name) {
                        side.names.insert(resource.name.clone());
                        confirmed.push(resource.name.clone());
                    }
                    if side.watches(kind, &resource.name) {
                        side.have.insert(resource.name, resource.version.into_bytes());
                    }
                }
                response.removed_resources.iter().for_each(|name| _ = side.have.remove(name));
            }
            Form::Sotw => {
                let response = SotwResponse::decode(&*bytes);
                assert!(response.is_ok(), "{response:?}");
                let response = response.unwrap_or_default();
                side.nonce = response.nonce;
                if matches!(kind, Kind::Cluster | Kind::Listener) {
                    side.have.clear();
                }
                for any in response.resources {
                    let name = name_of(kind, &any.value).unwrap_or_default();
                    if side.watches(kind, &name) {
                        side.have.insert(name, any.value.to_vec());
                    }
                }
            }
        }
        let names = if self.form == Form::Sotw { side.names.iter().cloned().collect() } else { Vec::new() };
        let error = (!good).then(|| "no".to_owned());
        let nonce = self.nonces.read(&side.nonce);
        assert!(matches!(nonce, Nonce::Of(_)), "{nonce:?} of {kind}");
        self.ask(SubscriptionRequest { kind, nonce, error, names, ..SubscriptionRequest::default() });
        if !confirmed.is_empty() {
            self.ask(SubscriptionRequest { kind, names: confirmed, ..SubscriptionRequest::default() });
        }
        true
    }

    /// A new stream, to which the client says what it has.
    fn reconnect(&mut self) {
        self.interest = Arc::default();
        self.session = Session::new(self.form, Arc::clone(&self.interest), Arc::default());
        self.nonces = Nonces::new();
        self.under_way.clear();
        let form = self.form;
        // Who wants nothing says nothing: it would mean all.
        self.kinds.retain(|_, side| form == Form::Sotw || !side.names.is_empty());
        let mut asks = Vec::new();
        for (kind, side) in &mut self.kinds {
            side.nonce.clear();
            side.nameless = form == Form::Sotw && side.names.is_empty();
            let text = |version: &Vec<u8>| String::from_utf8_lossy(version).into_owned();
            let have: Vec<_> =
                side.have.iter().map(|(name, version)| (name.clone(), text(version))).collect();
            let have = if form == Form::Delta { have.into_iter().collect() } else { Default::default() };
            asks.push(SubscriptionRequest {
                kind: *kind,
                names: side.names.iter().cloned().collect(),
                have,
                ..SubscriptionRequest::default()
            });
        }
        asks.into_iter().for_each(|ask| self.ask(ask));
    }

    /// The client sends these bytes.
    fn say(&mut self, bytes: &[u8]) {
        self.wild = true;
        let mut begun = PartialMessage::default();
        begun.0.extend_from_slice(bytes);
        loop {
            let ask = match self.form {
                Form::Delta => begun.complete::<DeltaRequest>(MAX_REQUEST).map(|one| self.asked(one)),
                Form::Sotw => begun.complete::<SotwRequest>(MAX_REQUEST).map(|one| self.asked(one)),
            };
            let Ok(Some(ask)) = ask else { return };
            if let Ok(ask) = ask {
                self.ask(ask);
                self.deliver();
            }
        }
    }

    fn asked<R: IntoAsk>(&self, request: Option<R>) -> Option<Result<SubscriptionRequest, String>> {
        request.map(|request| request.into_ask(&self.nonces))
    }

    /// All is said and taken; then the client has what it asked for.
    fn finish(mut self) {
        while self.take(true) || self.session.is_holding() {
            if self.under_way.is_empty() {
                self.session.release();
            }
            self.deliver();
        }
        if self.wild {
            return;
        }
        let now = self.now();
        for (kind, side) in &self.kinds {
            let watched = now.iter(*kind).filter(|resource| side.watches(*kind, &resource.name));
            let expected: BTreeMap<String, Vec<u8>> = watched
                .map(|resource| {
                    let version = match self.form {
                        Form::Delta => resource.version_text().into_bytes(),
                        Form::Sotw => resource.body.to_vec(),
                    };
                    (resource.name.to_string(), version)
                })
                .collect();
            let whole = self.form == Form::Delta || matches!(kind, Kind::Cluster | Kind::Listener);
            // In the state of the world a client knows by itself what it needs no more, and is not told what is gone.
            let have: BTreeMap<_, _> =
                side.have.iter().filter(|(name, _)| whole || expected.contains_key(*name)).collect();
            assert_eq!(have, expected.iter().collect(), "{kind} of a client that asks for {:?}", side.names);
            for alias in
                side.names.iter().filter(|name| self.form == Form::Delta && ALIASES.contains(&name.as_str()))
            {
                let found = now.find(*kind, alias);
                assert!(
                    found.is_none_or(|host| side.have.contains_key(&*host.name)),
                    "{found:?} of {alias} is missing"
                );
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_asks_has_in_the_end_what_there_is() {
        for seed in 0..5_000 {
            let mut random = fastrand::Rng::with_seed(seed);
            let mut script = vec![0; random.usize(2..80)];
            random.fill(&mut script);
            // Few say what no client says.
            if seed % 8 != 0 {
                script
                    .iter_mut()
                    .skip(1)
                    .step_by(2)
                    .filter(|what| **what & 15 == 15)
                    .for_each(|what| *what -= 1);
            }
            assert!(!fails(&script), "seed {seed}: {}", told(&shortest(script)));
        }
    }

    /// Who asks for all while what it no longer asked for is under way, and gone, does not keep that.
    #[test]
    fn what_is_under_way_and_gone_is_not_kept() {
        stream(&[0, 0, 0, 5, 16, 8, 12, 3, 12, 9, 0]);
    }

    /// Who takes back what led to a host has it when it asks for that again, for the host, or still for an alias.
    #[test]
    fn what_was_given_when_it_was_not_asked_for_is_given_again() {
        stream(&[0, 64, 76, 69, 2, 69, 10, 76, 1, 69, 2]);
        stream(&[0, 64, 100, 69, 2, 149, 74, 109, 149, 71, 0]);
        stream(&[0, 144, 223, 69, 225, 73, 42, 140, 180, 221, 176, 74, 104]);
    }

    /// In the state of the world who asks for nothing, and then for all again, while a response is under way has forgotten what there is.
    #[test]
    fn what_was_forgotten_meanwhile_comes_again() {
        stream(&[35, 17, 114, 89, 137, 89, 30, 204, 83, 154, 73, 217, 88]);
    }

    fn fails(script: &[u8]) -> bool {
        std::panic::catch_unwind(|| stream(script)).is_err()
    }

    /// What is left of a script that fails without all that may be left out.
    fn shortest(mut script: Vec<u8>) -> Vec<u8> {
        let mut at = 1;
        while at + 1 < script.len() {
            let shorter = [&script[..at], &script[at + 2..]].concat();
            if fails(&shorter) {
                script = shorter;
                at = 1;
            } else {
                at += 2;
            }
        }
        script
    }

    fn told(script: &[u8]) -> String {
        let kinds = kinds(form(script[0]));
        let steps = script[1..].chunks(2).map(|step| {
            let kind = kinds[usize::from(step[0] >> 4) % kinds.len()];
            let argument = step.get(1).copied().unwrap_or_default();
            format!("{} {kind} {} ({argument})", step[0] & 15, name(kind, argument))
        });
        format!("{:?} {script:?}: {}", form(script[0]), steps.collect::<Vec<_>>().join(", "))
    }
}
