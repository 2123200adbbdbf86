use super::*;

fn enter(limits: &Arc<Limits>, identity: &str, instance: &str) -> Result<StreamAccount, Status> {
    let account = Arc::new(Account::new(Arc::clone(limits), "test".into()));
    StreamAccount::enter(account, CallerAccount::new(limits, &identity.into(), &instance.into()))
}

#[test]
fn an_identity_pays_for_closed_connections() {
    let limits = Arc::new(Limits::default());
    for _ in 0..2 * IDENTITY_FACTOR {
        let member = enter(&limits, "a", "1").unwrap();
        // The debt remains when the connection is closed.
        member.charge(BURST, 0, 0);
    }
    let member = enter(&limits, "a", "1").unwrap();
    assert_eq!(member.account.pace.wait(), None, "the connection owes nothing");
    let wait = member.caller.wait().unwrap();
    assert!(wait > Duration::from_secs(60), "{wait:?}");
}

#[test]
fn an_instance_that_spends_the_identity_pace_delays_only_itself() {
    let limits = Arc::new(Limits::default());
    let evil = enter(&limits, "a", "evil").unwrap();
    evil.charge(2 * IDENTITY_FACTOR * BURST, 0, 0);
    let replica = enter(&limits, "a", "good").unwrap();
    replica.charge(BURST - CALL_COST, 0, 0);
    assert!(evil.caller.wait().is_some());
    assert_eq!(replica.caller.wait(), None, "a replica may charge as much as one connection");
    replica.charge(RATE * 60, 0, 0);
    assert!(replica.caller.wait().is_some_and(|wait| wait <= Duration::from_millis(60_001)), "and no more");
    assert_eq!(enter(&limits, "b", "evil").unwrap().caller.wait(), None);
}

#[test]
fn an_instance_may_use_the_whole_identity_pace() {
    let limits = Arc::new(Limits::default());
    let member = enter(&limits, "a", "1").unwrap();
    member.charge(IDENTITY_FACTOR * (BURST - CALL_COST), 0, 0);
    assert_eq!(member.caller.wait(), None);
}

#[test]
fn only_free_bytes_are_refunded() {
    // A large number, so that the debt paid during the test does not matter.
    const BYTES: usize = 1 << 50;
    let debt = |bytes: usize, free| {
        let member = enter(&Arc::default(), "a", "1").unwrap();
        member.account.pace.charge(bytes as u64);
        member.charge(0, bytes, free);
        [member.account.pace.debt(), member.caller.of_instance.pace.debt()].map(|debt| debt > 1 << 49)
    };
    assert_eq!(debt(BYTES, FREE_ACKNOWLEDGEMENT), [true, true]);
    assert_eq!(debt(BYTES, BYTES), [false, false]);
    assert_eq!(debt(BYTES, usize::MAX), [false, false]);
}

#[test]
fn lists_of_names_are_counted_for_the_instance() {
    let limits = Arc::new(Limits::default());
    let mut members: Vec<_> = (0..2).map(|_| enter(&limits, "a", "1").unwrap()).collect();
    members[0].set_list_bytes(MAX_INSTANCE_LISTS - 16).unwrap();
    members[1].set_list_bytes(16).unwrap();
    assert_eq!(members[1].set_list_bytes(32).unwrap_err().code(), tonic::Code::ResourceExhausted);
    enter(&limits, "a", "2").unwrap().set_list_bytes(MAX_INSTANCE_LISTS).unwrap();
    drop(members.remove(0));
    members[0].set_list_bytes(MAX_INSTANCE_LISTS).unwrap();
    assert_eq!(limits.reached(Bound::Names), 1);
}

#[test]
fn identities_and_instances_without_debt_are_removed() {
    let limits = Arc::new(Limits::default());
    let of = |instance: &str| CallerAccount::new(&limits, &"a".into(), &instance.into());
    let (one, same, other) = (of("1"), of("1"), of("2"));
    let instances = || lock(&limits.identities).get("a").map_or(0, |usage| usage.instances.len());
    drop(one);
    assert_eq!(instances(), 2, "another call of the instance is in progress");
    drop(same);
    assert_eq!(instances(), 1);
    other.of_instance.pace.charge(BURST);
    drop(other);
    assert_eq!(instances(), 1, "it still owes");
    // An instance whose debt is paid is removed when there are many.
    lock(&limits.identities)["a"].instances["2"].pace.refund(BURST);
    let many: Vec<_> = (0..MANY).map(|instance| of(&format!("many-{instance}"))).collect();
    assert_eq!(instances(), MANY);
    drop(many);
    assert!(lock(&limits.identities).is_empty());
}

#[test]
fn streams_and_names_are_counted_by_connection_and_identity() {
    let limits = Limits { identity_streams: 2, identity_names: MAX_NAMES + 100, ..Limits::default() };
    let limits = Arc::new(limits);
    let connection = || Arc::new(Account::new(Arc::clone(&limits), "test".into()));
    let (one, other) = (connection(), connection());
    let enter = |account: &Arc<Account>, who: &str| {
        StreamAccount::enter(Arc::clone(account), CallerAccount::new(&limits, &who.into(), &"1".into()))
    };
    let (mut first, mut second) = (enter(&one, "a").unwrap(), enter(&other, "a").unwrap());
    assert_eq!(enter(&one, "a").unwrap_err().code(), tonic::Code::ResourceExhausted);
    let mut of_other_identity = enter(&one, "b").unwrap();

    first.set_name_bytes(MAX_NAMES).unwrap();
    assert!(
        of_other_identity
            .set_name_bytes(1)
            .unwrap_err()
            .message()
            .starts_with("the subscribed names of this connection")
    );
    of_other_identity.set_name_bytes(0).unwrap();
    second.set_name_bytes(100).unwrap();
    assert!(second.set_name_bytes(101).unwrap_err().message().starts_with("the subscribed names of a that"));
    first.set_name_bytes(0).unwrap();
    assert!(second.set_name_bytes(101).is_ok());

    drop((first, second, of_other_identity));
    let identities = lock(&limits.identities);
    assert!(identities.values().all(|usage| usage.streams == 0 && usage.names == 0));
    drop(identities);
    assert_eq!(one.names.load(Relaxed), 0);
    let reached = Bound::ALL.map(|bound| limits.reached(bound));
    assert_eq!(reached, [0, 0, 0, 0, 1, 1, 1, 0]);
}
