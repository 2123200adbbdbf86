//! Unit tests of the rules, as texts.

use super::*;

fn rules(exceptions: &Exceptions, family: Family) -> (Vec<String>, Vec<String>) {
    let sidecar = [Sender::User(1337), Sender::Group(1337)];
    let interception = Interception {
        sidecar: &sidecar,
        outbound_port: 15001,
        inbound_port: 15006,
        exceptions,
        before: Vec::new(),
    };
    let rules = interception.rules(family);
    assert!(rules.leaving.is_empty());
    let texts = |rules: Vec<Rule>| rules.iter().map(Rule::to_string).collect();
    (texts(rules.output), texts(rules.input))
}

#[test]
fn without_exceptions_all_tcp_connections_but_those_of_the_sidecar_are_redirected() {
    let (output, input) = rules(&Exceptions::default(), Family::V4);
    assert_eq!(
        output,
        [
            "oif \"lo\" ip saddr 127.0.0.6/32 accept",
            "meta l4proto tcp meta skuid 1337 oif \"lo\" ip daddr != 127.0.0.1/32 redirect to :15006",
            "meta l4proto tcp meta skgid 1337 oif \"lo\" ip daddr != 127.0.0.1/32 redirect to :15006",
            "meta skuid 1337 accept",
            "meta skgid 1337 accept",
            "oif \"lo\" accept",
            "ip daddr 127.0.0.1/32 accept",
            "meta l4proto tcp redirect to :15001",
        ]
    );
    assert_eq!(input, ["meta l4proto tcp redirect to :15006"]);
    let (output, _) = rules(&Exceptions::default(), Family::V6);
    assert_eq!(output[0], "oif \"lo\" ip6 saddr ::6/128 accept");
    assert_eq!(output[6], "ip6 daddr ::1/128 accept");
}

#[test]
fn exceptions_apply_to_their_family_and_exclusions_come_first() {
    let exceptions = Exceptions {
        include_inbound: "8080".parse().unwrap(),
        exclude_inbound: vec![15020],
        include_outbound: vec![443],
        exclude_outbound: vec![25],
        include_ranges: "10.0.0.0/8, fd00::/8".parse().unwrap(),
        exclude_ranges: vec!["10.1.0.0/16".parse().unwrap(), "fd01::/16".parse().unwrap()],
        virtual_interfaces: vec!["vm0".parse().unwrap()],
        exclude_interfaces: vec!["net+".parse().unwrap()],
    };
    let (output, input) = rules(&exceptions, Family::V4);
    assert_eq!(output[..2], ["oifname \"net*\" accept", "oif \"lo\" th dport 25 accept"]);
    let rest = [
        "th dport 25 accept",
        "ip daddr 10.1.0.0/16 accept",
        "meta l4proto tcp th dport 443 redirect to :15001",
        "meta l4proto tcp ip daddr 10.0.0.0/8 redirect to :15001",
    ];
    assert_eq!(output[output.len() - 4..], rest);
    assert_eq!(
        input,
        [
            "meta l4proto tcp iifname \"vm0\" ip daddr 10.0.0.0/8 redirect to :15001",
            "iifname \"vm0\" accept",
            "iifname \"net*\" accept",
            "th dport 15020 accept",
            "meta l4proto tcp th dport 8080 redirect to :15006",
        ]
    );
    let (output, input) = rules(&exceptions, Family::V6);
    assert_eq!(output[output.len() - 3], "ip6 daddr fd01::/16 accept");
    assert_eq!(output[output.len() - 1], "meta l4proto tcp ip6 daddr fd00::/8 redirect to :15001");
    assert_eq!(input[0], "meta l4proto tcp iifname \"vm0\" ip6 daddr fd00::/8 redirect to :15001");
}

#[test]
fn an_empty_list_includes_nothing() {
    let exceptions = Exceptions {
        include_inbound: "".parse().unwrap(),
        include_ranges: "".parse().unwrap(),
        virtual_interfaces: vec!["vm0".parse().unwrap()],
        ..Exceptions::default()
    };
    let (output, input) = rules(&exceptions, Family::V4);
    assert!(!output.iter().any(|rule| rule.ends_with(":15001")), "{output:?}");
    assert_eq!(input, ["iifname \"vm0\" accept"]);
}

#[test]
fn an_included_loopback_network_is_intercepted() {
    let exceptions = Exceptions { include_ranges: "127.0.0.0/8".parse().unwrap(), ..Exceptions::default() };
    let (output, _) = rules(&exceptions, Family::V4);
    assert!(!output.contains(&"oif \"lo\" accept".to_owned()), "{output:?}");
    assert_eq!(output.last().unwrap(), "meta l4proto tcp ip daddr 127.0.0.0/8 redirect to :15001");
    assert!(exceptions.intercept_outbound([127, 0, 0, 2].into(), 80));
    assert!(!exceptions.intercept_outbound([127, 0, 0, 1].into(), 80));
    assert!(!Exceptions::default().intercept_outbound([127, 0, 0, 2].into(), 80));
}

#[test]
fn an_invalid_item_is_named() {
    assert_eq!("8080,many".parse::<Include<u16>>(), Err("\"many\" is not valid".to_owned()));
    assert_eq!("1,65536".parse::<List<u16>>(), Err("\"65536\" is not valid".to_owned()));
    assert_eq!("*,80".parse::<Include<u16>>(), Err("\"*\" is not valid".to_owned()));
    assert_eq!(" * ".parse::<Include<u16>>(), Ok(Include::All));
    assert_eq!("22, 9000,".parse::<List<u16>>(), Ok(List(vec![22, 9000])));
}
