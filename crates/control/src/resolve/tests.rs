//! The resolver, with paused time and scripted answers.

use std::{collections::HashMap, net::IpAddr, sync::Mutex};

use super::{cache::RecordSet, *};

type Script = Arc<Mutex<HashMap<(String, Family), Result<Answer, LookupError>>>>;

/// A resolver whose answers come from a script.
struct Setup {
    script: Script,
    queries: Arc<Mutex<Vec<(String, Family)>>>,
    wanted: watch::Sender<(Arc<LookupNames>, Duration)>,
    events: mpsc::UnboundedReceiver<LookupEvent>,
    cache: Arc<DnsCache>,
}

const RATE: Duration = Duration::from_secs(60);

fn ips(texts: &[&str]) -> Vec<IpAddr> {
    texts.iter().map(|text| text.parse().unwrap()).collect()
}

fn addresses(texts: &[&str], ttl: u64) -> Result<Answer, LookupError> {
    Ok(Answer::Addresses(ips(texts), Duration::from_secs(ttl)))
}

fn no_addresses(nxdomain: bool) -> Result<Answer, LookupError> {
    Ok(Answer::NoAddresses { nxdomain, ttl: Some(Duration::from_secs(30)) })
}

fn wanted(names: &[&str]) -> (Arc<LookupNames>, Duration) {
    (Arc::new(names.iter().map(|name| (Arc::from(*name), vec!["x/y".to_owned()])).collect()), RATE)
}

impl Setup {
    /// Looks up these names. DNS has no IPv6 addresses; IPv4 lookups that are not in the script fail.
    fn new(names: &[&str], script: &[(&str, Result<Answer, LookupError>)]) -> Self {
        Self::with(DnsCache::default(), names, script)
    }

    /// The same with an existing cache.
    fn with(cache: DnsCache, names: &[&str], script: &[(&str, Result<Answer, LookupError>)]) -> Self {
        let (sender, receiver) = watch::channel(wanted(names));
        let (sender_of_events, events) = mpsc::unbounded_channel();
        let setup = Self {
            script: Script::default(),
            queries: Arc::default(),
            wanted: sender,
            events,
            cache: Arc::new(cache),
        };
        script.iter().for_each(|(name, answer)| setup.answer(name, answer.clone()));
        let (script, queries) = (Arc::clone(&setup.script), Arc::clone(&setup.queries));
        let lookup = move |name: Arc<str>, family| {
            let key = (name.to_string(), family);
            queries.lock().unwrap().push(key.clone());
            let default = if family == Family::V6 { no_addresses(false) } else { Err("no answer".into()) };
            let answer = script.lock().unwrap().get(&key).cloned().unwrap_or(default);
            async move {
                tokio::time::sleep(Duration::from_millis(1)).await;
                answer
            }
        };
        let cache = Arc::clone(&setup.cache);
        tokio::spawn(Resolver { lookup, cache, names: receiver, events: sender_of_events }.run());
        setup
    }

    fn answer(&self, name: &str, answer: Result<Answer, LookupError>) {
        self.script.lock().unwrap().insert((name.to_owned(), Family::V4), answer);
    }

    /// Returns the next change.
    async fn change(&mut self) -> (String, Option<Vec<String>>) {
        loop {
            match self.events.recv().await.unwrap() {
                LookupEvent::Changed(name, resolved) => {
                    let text =
                        |resolved: Resolved| resolved.addresses.iter().map(ToString::to_string).collect();
                    return (name.to_string(), resolved.map(text));
                }
                LookupEvent::FirstRoundDone => {}
            }
        }
    }

    async fn advance(&self, seconds: u64) {
        tokio::time::sleep(Duration::from_secs(seconds)).await;
    }

    /// Returns the number of IPv4 lookups since the last call.
    fn take_queries(&self) -> usize {
        let mut queries = self.queries.lock().unwrap();
        std::mem::take(&mut *queries).into_iter().filter(|(_, family)| *family == Family::V4).count()
    }

    fn condition(&self, name: &str) -> Condition {
        self.cache.lock()[name].condition()
    }
}

fn has(name: &str, addresses: &[&str]) -> (String, Option<Vec<String>>) {
    (name.to_owned(), Some(addresses.iter().map(|ip| (*ip).to_owned()).collect()))
}

#[tokio::test(start_paused = true)]
async fn names_are_looked_up_when_they_expire_and_reported_when_they_change() {
    let mut setup = Setup::new(&["a.b"], &[("a.b", addresses(&["10.0.0.2", "10.0.0.1"], 10))]);
    assert_eq!(setup.change().await, has("a.b", &["10.0.0.1", "10.0.0.2"]));
    setup.advance(100).await;
    let queries = setup.take_queries();
    assert!((10..=11).contains(&queries), "{queries}");
    // A different order is not a change.
    setup.answer("a.b", addresses(&["10.0.0.1", "10.0.0.2"], 10));
    setup.advance(20).await;
    setup.answer("a.b", addresses(&["10.0.0.3"], 10));
    assert_eq!(setup.change().await, has("a.b", &["10.0.0.3"]));
    setup.wanted.send(wanted(&["c.d"])).unwrap();
    assert_eq!(setup.change().await, ("a.b".to_owned(), None));
    setup.advance(5).await;
    setup.take_queries();
    setup.advance(100).await;
    let queries = setup.queries.lock().unwrap().clone();
    assert!(queries.iter().all(|(name, _)| name == "c.d"), "{queries:?}");
}

#[tokio::test(start_paused = true)]
async fn last_addresses_stay_while_lookups_fail_and_an_answer_without_addresses_removes_them() {
    let mut setup = Setup::new(&["a.b"], &[("a.b", addresses(&["10.0.0.1"], 5))]);
    assert_eq!(setup.change().await, has("a.b", &["10.0.0.1"]));
    setup.answer("a.b", Err("SERVFAIL".into()));
    setup.advance(24 * 3600).await;
    assert_eq!(setup.condition("a.b"), Condition::Stale);
    // The retry delay is between 30 s and 60 s.
    let queries = setup.take_queries();
    assert!((24 * 60..=2 * 24 * 60 + 10).contains(&queries), "{queries}");
    setup.answer("a.b", no_addresses(true));
    assert_eq!(setup.change().await, has("a.b", &[]));
    assert_eq!(setup.condition("a.b"), Condition::Missing);
    setup.answer("a.b", addresses(&["10.0.0.1"], 5));
    assert_eq!(setup.change().await, has("a.b", &["10.0.0.1"]));
    assert_eq!(setup.condition("a.b"), Condition::Resolved);
}

#[tokio::test(start_paused = true)]
async fn a_name_whose_first_lookup_fails_has_no_addresses() {
    let mut setup = Setup::new(&["a.b"], &[]);
    assert_eq!(setup.change().await, has("a.b", &[]));
    setup.advance(1).await;
    assert_eq!(setup.condition("a.b"), Condition::Failed);
    let status = serde_json::to_value(setup.cache.status()).unwrap();
    assert_eq!(status[0]["records"]["A"]["error"], "no answer");
    assert_eq!(status[0]["used_by"][0], "x/y");
}

#[tokio::test(start_paused = true)]
async fn last_addresses_stay_over_a_restart_while_lookups_fail() {
    let folder = tempfile::tempdir().unwrap();
    let open = || DnsCache::open(Some(folder.path()));
    let script = [("a.b", addresses(&["10.0.0.2", "10.0.0.1"], 5)), ("c.d", addresses(&["10.0.0.3"], 5))];
    let mut setup = Setup::with(open(), &["a.b", "c.d", "e.f"], &script);
    for _ in 0..3 {
        setup.change().await;
    }
    setup.cache.write().unwrap();

    let mut setup = Setup::with(open(), &["a.b", "e.f"], &[]);
    assert_eq!(setup.change().await, has("a.b", &["10.0.0.1", "10.0.0.2"]), "before the first answer");
    assert_eq!(setup.change().await, has("a.b", &["10.0.0.1", "10.0.0.2"]));
    assert_eq!(setup.change().await, has("e.f", &[]));
    setup.advance(1).await;
    assert_eq!(setup.condition("a.b"), Condition::Stale);
    assert_eq!(setup.cache.lock()["a.b"].resolved().current, ips(&["10.0.0.2"]).into_iter().collect());
    setup.answer("a.b", no_addresses(true));
    assert_eq!(setup.change().await, has("a.b", &[]), "an answer removes them");
    setup.cache.write().unwrap();

    let mut setup = Setup::with(open(), &["a.b", "c.d"], &[]);
    let changes = [setup.change().await, setup.change().await];
    assert_eq!(changes, [has("a.b", &[]), has("c.d", &[])], "unused names are not kept");
}

#[tokio::test(start_paused = true)]
async fn the_first_round_ends_after_one_lookup_of_every_name() {
    let names: Vec<String> = (0..1_000).map(|number| format!("n-{number}.b")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let answers: Vec<_> = names.iter().skip(1).map(|name| (*name, addresses(&["10.0.0.1"], 5))).collect();
    let mut setup = Setup::new(&names, &answers);
    let mut known = HashSet::new();
    while let LookupEvent::Changed(name, _) = setup.events.recv().await.unwrap() {
        known.insert(name);
    }
    assert_eq!(known.len(), names.len());
    setup.take_queries();
    setup.advance(10).await;
    let times = setup
        .cache
        .lock()
        .values()
        .map(|entry| entry.families[&Family::V4].schedule.next_query)
        .collect::<HashSet<_>>();
    assert!(times.len() > 500, "{} different times", times.len());
}

#[tokio::test(start_paused = true)]
async fn thousands_of_names_are_added_and_removed_in_linear_time() {
    let mut setup = Setup::new(&["a.b"], &[("a.b", addresses(&["10.0.0.1"], 5))]);
    setup.change().await;
    let names: Vec<String> = (0..5_000).map(|number| format!("n-{number}.b")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    // Quadratic time would take minutes.
    for round in 0..2 {
        setup.wanted.send(wanted(&names)).unwrap();
        setup.advance(1 + round).await;
        setup.wanted.send(wanted(&[])).unwrap();
        setup.advance(1).await;
    }
    assert!(setup.cache.lock().is_empty());
}

#[tokio::test(start_paused = true)]
async fn without_names_the_first_round_ends_at_once() {
    let mut setup = Setup::new(&[], &[]);
    assert_eq!(setup.events.recv().await, Some(LookupEvent::FirstRoundDone));
}

#[test]
fn the_current_address_stays_while_answers_contain_it() {
    let now = Instant::now();
    let mut records = RecordSet::new(Vec::new(), now);
    let mut current = |texts: &[&str]| {
        records.apply(addresses(texts, 5), RATE, now);
        records.current.unwrap().to_string()
    };
    assert_eq!(current(&["10.0.0.2", "10.0.0.1"]), "10.0.0.2");
    assert_eq!(current(&["10.0.0.1", "10.0.0.2"]), "10.0.0.2");
    assert_eq!(current(&["10.0.0.3", "10.0.0.1"]), "10.0.0.3");
}
