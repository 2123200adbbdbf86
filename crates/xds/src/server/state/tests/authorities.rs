//! Changes of virtual hosts: only names that a change may concern are resolved again.

use super::*;

/// Returns a random name of a virtual host, an authority or a domain. There are few, so that they often match.
fn random(random: &mut fastrand::Rng, wildcard: bool) -> String {
    let labels: Vec<_> = (0..random.usize(1..5)).map(|_| ["a", "b", "c"][random.usize(0..3)]).collect();
    format!("{}/{}{}", random.u8(80..82), if wildcard { "*." } else { "" }, labels.join("."))
}

fn host(with: &mut fastrand::Rng, name: &str, many: bool) -> Arc<Resource> {
    let count = if many { 3_000 } else { with.usize(0..4) };
    let mut aliases: Vec<_> = (0..count)
        .map(|number| match number {
            0..4 => {
                let wildcard = with.bool();
                random(with, wildcard)
            }
            number => format!("80/many-{number}"),
        })
        .collect();
    if with.bool() {
        aliases.push(name.to_owned());
    }
    let body = aliases.join(",").into_bytes().into();
    Resource::with_aliases(VirtualHost, name, body, aliases.iter().map(String::as_str))
}

/// Checks that each name resolves as a full lookup does, and that the client is sent the host.
fn check(session: &Session, world: &World) {
    let (subscription, snapshot) = (&session.subscriptions[VirtualHost as usize], world.now());
    for name in subscription.names.0.iter().filter(|name| snapshot.get(VirtualHost, name).is_none()) {
        let all = snapshot.find(VirtualHost, name).map(|host| &host.name);
        assert_eq!(subscription.resolved.get(name), all, "{name}");
        assert!(all.is_none_or(|host| subscription.is_sent(host)), "{name} {all:?}");
    }
}

#[test]
fn resolving_changed_names_equals_resolving_all() {
    for seed in 0..40 {
        let mut with = fastrand::Rng::with_seed(seed);
        let mut world = World::default();
        let mut session = Session::new(Form::Delta, Arc::default(), Arc::default());
        let mut nonce = Vec::new();
        for step in 0..150 {
            for _ in 0..with.usize(0..4) {
                let (name, generation) = (random(&mut with, false), world.now().generation() + 1);
                match with.u8(0..20) {
                    0..9 => _ = world.0.remove(generation, VirtualHost, &name),
                    _ => {
                        let resource = host(&mut with, &name, seed % 4 == 0 && step == 100);
                        world.insert(resource);
                    }
                }
            }
            let names =
                |with: &mut fastrand::Rng| (0..with.usize(0..3)).map(|_| random(with, false)).collect();
            let request = match with.u8(0..3) {
                0 => SubscriptionRequest { names: names(&mut with), ..ask(VirtualHost, 0, &[]) },
                1 => SubscriptionRequest {
                    unsubscribe: names(&mut with),
                    ..ask(VirtualHost, 0, &["80/a.a", "81/b.c"])
                },
                _ => ask(VirtualHost, 0, &["82/none"]),
            };
            session.request(request, &world.now(), &mut |_| {});
            // Acknowledges responses until nothing is due.
            loop {
                nonce.extend(session.pushes(&world.now()).unwrap().iter().map(|push| push.number));
                let Some(number) = nonce.pop() else { break };
                if with.u8(0..8) == 0 {
                    nonce.push(number);
                    break;
                }
                session.request(ask(VirtualHost, number, &[]), &world.now(), &mut |_| {});
            }
            if nonce.is_empty() {
                check(&session, &world);
            }
        }
    }
}
