//! The resolver, under a clock that the test moves.

use std::collections::HashMap;

use super::*;

type Script = Arc<Mutex<HashMap<(String, Family), Result<Answer, Failure>>>>;

/// A resolver whose answers the test gives.
struct Setup {
    script: Script,
    asked: Arc<Mutex<Vec<(String, Family)>>>,
    wanted: watch::Sender<(Arc<Wanted>, Duration)>,
    events: mpsc::UnboundedReceiver<Event>,
    names: Arc<Names>,
}

const RATE: Duration = Duration::from_secs(60);

fn ips(texts: &[&str]) -> Vec<IpAddr> {
    texts.iter().map(|text| text.parse().unwrap()).collect()
}

fn found(texts: &[&str], ttl: u64) -> Result<Answer, Failure> {
    Ok(Answer::Addresses(ips(texts), Duration::from_secs(ttl)))
}

fn nothing(missing: bool) -> Result<Answer, Failure> {
    Ok(Answer::Nothing { missing, ttl: Some(Duration::from_secs(30)) })
}

fn wanted(names: &[&str]) -> (Arc<Wanted>, Duration) {
    (Arc::new(names.iter().map(|name| (Arc::from(*name), vec!["x/y".to_owned()])).collect()), RATE)
}

impl Setup {
    /// Wants these names; DNS has no IPv6 addresses, and what is not in the script fails.
    fn new(names: &[&str], script: &[(&str, Result<Answer, Failure>)]) -> Self {
        Self::with(Names::default(), names, script)
    }

    /// With what is known of names.
    fn with(known: Names, names: &[&str], script: &[(&str, Result<Answer, Failure>)]) -> Self {
        let (sender, receiver) = watch::channel(wanted(names));
        let (told, events) = mpsc::unbounded_channel();
        let setup = Self {
            script: Script::default(),
            asked: Arc::default(),
            wanted: sender,
            events,
            names: Arc::new(known),
        };
        script.iter().for_each(|(name, answer)| setup.answer(name, answer.clone()));
        let (script, asked) = (Arc::clone(&setup.script), Arc::clone(&setup.asked));
        let ask = move |name: Arc<str>, family| {
            let key = (name.to_string(), family);
            asked.lock().unwrap().push(key.clone());
            let usual = if family == Family::V6 { nothing(false) } else { Err("no answer".into()) };
            let answer = script.lock().unwrap().get(&key).cloned().unwrap_or(usual);
            async move {
                tokio::time::sleep(Duration::from_millis(1)).await;
                answer
            }
        };
        tokio::spawn(Resolver { ask, names: Arc::clone(&setup.names), wanted: receiver, told }.run());
        setup
    }

    fn answer(&self, name: &str, answer: Result<Answer, Failure>) {
        self.script.lock().unwrap().insert((name.to_owned(), Family::V4), answer);
    }

    /// What is told next.
    async fn told(&mut self) -> (String, Option<Vec<String>>) {
        loop {
            match self.events.recv().await.unwrap() {
                Event::Changed(name, now) => {
                    let text = |now: Resolved| now.addresses.iter().map(ToString::to_string).collect();
                    return (name.to_string(), now.map(text));
                }
                Event::Settled => {}
            }
        }
    }

    async fn pass(&self, seconds: u64) {
        tokio::time::sleep(Duration::from_secs(seconds)).await;
    }

    /// How often IPv4 addresses were asked for since this was last called.
    fn questions(&self) -> usize {
        let mut asked = self.asked.lock().unwrap();
        std::mem::take(&mut *asked).into_iter().filter(|(_, family)| *family == Family::V4).count()
    }

    fn condition(&self, name: &str) -> Condition {
        self.names.lock()[name].condition()
    }
}

fn has(name: &str, addresses: &[&str]) -> (String, Option<Vec<String>>) {
    (name.to_owned(), Some(addresses.iter().map(|ip| (*ip).to_owned()).collect()))
}

#[tokio::test(start_paused = true)]
async fn names_are_asked_for_when_they_expire_and_told_when_they_change() {
    let mut setup = Setup::new(&["a.b"], &[("a.b", found(&["10.0.0.2", "10.0.0.1"], 10))]);
    assert_eq!(setup.told().await, has("a.b", &["10.0.0.1", "10.0.0.2"]));
    setup.pass(100).await;
    let questions = setup.questions();
    assert!((10..=11).contains(&questions), "{questions}");
    // Another order is no change.
    setup.answer("a.b", found(&["10.0.0.1", "10.0.0.2"], 10));
    setup.pass(20).await;
    setup.answer("a.b", found(&["10.0.0.3"], 10));
    assert_eq!(setup.told().await, has("a.b", &["10.0.0.3"]));
    setup.wanted.send(wanted(&["c.d"])).unwrap();
    assert_eq!(setup.told().await, ("a.b".to_owned(), None));
    setup.pass(5).await;
    setup.questions();
    setup.pass(100).await;
    let asked = setup.asked.lock().unwrap().clone();
    assert!(asked.iter().all(|(name, _)| name == "c.d"), "{asked:?}");
}

#[tokio::test(start_paused = true)]
async fn last_addresses_stay_while_there_is_no_answer_and_go_when_there_are_none() {
    let mut setup = Setup::new(&["a.b"], &[("a.b", found(&["10.0.0.1"], 5))]);
    assert_eq!(setup.told().await, has("a.b", &["10.0.0.1"]));
    setup.answer("a.b", Err("SERVFAIL".into()));
    setup.pass(24 * 3600).await;
    assert_eq!(setup.condition("a.b"), Condition::Stale);
    // A minute is the longest pause, and half of it the shortest then.
    let questions = setup.questions();
    assert!((24 * 60..=2 * 24 * 60 + 10).contains(&questions), "{questions}");
    setup.answer("a.b", nothing(true));
    assert_eq!(setup.told().await, has("a.b", &[]));
    assert_eq!(setup.condition("a.b"), Condition::Missing);
    setup.answer("a.b", found(&["10.0.0.1"], 5));
    assert_eq!(setup.told().await, has("a.b", &["10.0.0.1"]));
    assert_eq!(setup.condition("a.b"), Condition::Resolved);
}

#[tokio::test(start_paused = true)]
async fn a_name_that_never_had_an_answer_has_no_addresses() {
    let mut setup = Setup::new(&["a.b"], &[]);
    assert_eq!(setup.told().await, has("a.b", &[]));
    setup.pass(1).await;
    assert_eq!(setup.condition("a.b"), Condition::Failed);
    let status = serde_json::to_value(setup.names.status()).unwrap();
    assert_eq!(status[0]["records"]["A"]["error"], "no answer");
    assert_eq!(status[0]["used_by"][0], "x/y");
}

#[tokio::test(start_paused = true)]
async fn last_addresses_stay_over_a_restart_while_there_is_no_answer() {
    let folder = tempfile::tempdir().unwrap();
    let open = || Names::open(Some(folder.path()));
    let script = [("a.b", found(&["10.0.0.2", "10.0.0.1"], 5)), ("c.d", found(&["10.0.0.3"], 5))];
    let mut setup = Setup::with(open(), &["a.b", "c.d", "e.f"], &script);
    for _ in 0..3 {
        setup.told().await;
    }
    setup.names.write().unwrap();

    let mut setup = Setup::with(open(), &["a.b", "e.f"], &[]);
    assert_eq!(setup.told().await, has("a.b", &["10.0.0.1", "10.0.0.2"]), "before there was any answer");
    assert_eq!(setup.told().await, has("a.b", &["10.0.0.1", "10.0.0.2"]));
    assert_eq!(setup.told().await, has("e.f", &[]));
    setup.pass(1).await;
    assert_eq!(setup.condition("a.b"), Condition::Stale);
    assert_eq!(setup.names.lock()["a.b"].resolved().current, ips(&["10.0.0.2"]).into_iter().collect());
    setup.answer("a.b", nothing(true));
    assert_eq!(setup.told().await, has("a.b", &[]), "an answer takes them away");
    setup.names.write().unwrap();

    let mut setup = Setup::with(open(), &["a.b", "c.d"], &[]);
    let told = [setup.told().await, setup.told().await];
    assert_eq!(told, [has("a.b", &[]), has("c.d", &[])], "and what nobody wants is forgotten");
}

#[tokio::test(start_paused = true)]
async fn the_start_is_over_when_every_name_was_asked_for_once() {
    let names: Vec<String> = (0..1_000).map(|number| format!("n-{number}.b")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let answers: Vec<_> = names.iter().skip(1).map(|name| (*name, found(&["10.0.0.1"], 5))).collect();
    let mut setup = Setup::new(&names, &answers);
    let mut known = HashSet::new();
    while let Event::Changed(name, _) = setup.events.recv().await.unwrap() {
        known.insert(name);
    }
    assert_eq!(known.len(), names.len());
    setup.questions();
    setup.pass(10).await;
    let waiting = setup
        .names
        .lock()
        .values()
        .map(|known| known.families[&Family::V4].expiry.due)
        .collect::<HashSet<_>>();
    assert!(waiting.len() > 500, "{} different moments", waiting.len());
}

#[tokio::test(start_paused = true)]
async fn many_names_that_come_and_go_at_once_hold_up_nobody() {
    let mut setup = Setup::new(&["a.b"], &[("a.b", found(&["10.0.0.1"], 5))]);
    setup.told().await;
    let names: Vec<String> = (0..5_000).map(|number| format!("n-{number}.b")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    // What grew with the square of the names would take minutes.
    for round in 0..2 {
        setup.wanted.send(wanted(&names)).unwrap();
        setup.pass(1 + round).await;
        setup.wanted.send(wanted(&[])).unwrap();
        setup.pass(1).await;
    }
    assert!(setup.names.lock().is_empty());
}

#[tokio::test(start_paused = true)]
async fn without_names_the_start_is_over_at_once() {
    let mut setup = Setup::new(&[], &[]);
    assert_eq!(setup.events.recv().await, Some(Event::Settled));
}

#[test]
fn where_one_address_is_enough_it_stays_while_it_is_among_the_answers() {
    let now = Instant::now();
    let mut records = Records::new(Vec::new(), now);
    let mut current = |texts: &[&str]| {
        records.take(found(texts, 5), RATE, now);
        records.current.unwrap().to_string()
    };
    assert_eq!(current(&["10.0.0.2", "10.0.0.1"]), "10.0.0.2");
    assert_eq!(current(&["10.0.0.1", "10.0.0.2"]), "10.0.0.2");
    assert_eq!(current(&["10.0.0.3", "10.0.0.1"]), "10.0.0.3");
}
