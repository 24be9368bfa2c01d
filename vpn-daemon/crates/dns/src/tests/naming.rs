//! Names, addresses, suffixes: `codervpn-protocol.md` 7 and `dns-and-os.md` 1.1, 1.2.

use std::net::Ipv6Addr;

use codervpn_wire::node::{coder_address, tailscale_address};
use proptest::prelude::{prop, proptest};
use uuid::Uuid;

use super::{AGENT, ask, at, id, input, workspace};
use crate::names::{self, SkipReason, fqdns, own_name};
use crate::{Agent, DNS_ADDRESS, DnsState, SelfTest, Suffix, SuffixError, SuffixRules, Workspace, Zone, ZoneHandle};
use crate::{self_test, suffix_tlds};

fn parse(raw: &str) -> Result<String, SuffixError> {
    Suffix::parse(raw, &SuffixRules::default()).map(|suffix| suffix.to_string())
}

#[test]
fn addresses_of_the_examples() {
    let address = |id: &str| coder_address(id.parse::<Uuid>().unwrap()).to_string();
    assert_eq!(address("7f3c9a52-1d4e-4b86-a2c7-5e90d1f8b364"), "fd60:627a:a42b:4b86:a2c7:5e90:d1f8:b364");
    assert_eq!(address("5e0c1f7a-2b3d-4c4e-8f60-718293a4b5c6"), "fd60:627a:a42b:4c4e:8f60:7182:93a4:b5c6");
    let legacy = tailscale_address("7f3c9a52-1d4e-4b86-a2c7-5e90d1f8b364".parse().unwrap());
    assert_eq!(legacy.to_string(), "fd7a:115c:a1e0:4b86:a2c7:5e90:d1f8:b364");
}

#[test]
fn names_are_lower_case_and_sorted_by_length_then_bytes() {
    let suffix = Suffix::default();
    let names = fqdns("Main", "Dev", "Alice", &suffix, true);
    assert_eq!(names, ["dev.coder.", "main.dev.me.coder.", "main.dev.alice.coder."]);
    assert_eq!(fqdns("main", "dev", "al", &suffix, false), ["main.dev.al.coder.", "main.dev.me.coder."]);
    assert_eq!(fqdns("main", "dev", "me", &suffix, false), ["main.dev.me.coder."]);
    assert_eq!(own_name(&suffix), "is.coder--connect--enabled--right--now.coder.");
}

/// CC-58: only the illegal name is left out; R-18: an agent may end up without any.
#[test]
fn illegal_names_are_skipped_alone() {
    let mut input = input();
    let long = "x".repeat(64);
    input.workspaces = vec![
        workspace(1, "ws", &[(AGENT, "bad name")]),
        workspace(2, "a.b", &[(Ipv6Addr::from(u128::from(AGENT) + 1), "main")]),
        workspace(3, "under_score", &[(Ipv6Addr::from(u128::from(AGENT) + 2), "")]),
        workspace(4, &long, &[(Ipv6Addr::from(u128::from(AGENT) + 3), "main")]),
    ];
    let assignment = names::assign(&input);
    let names: Vec<_> = assignment.agents.iter().map(|agent| agent.fqdn.clone()).collect();
    assert_eq!(names, [vec!["ws.coder."], vec![], vec!["under_score.coder."], vec![]]);
    assert_eq!(assignment.skipped.len(), 2 + 3 + 2 + 3);
    assert!(assignment.skipped.iter().all(|skipped| skipped.reason == SkipReason::Illegal));

    input.owner = "bo b".to_owned();
    input.workspaces = vec![workspace(1, "ws", &[(AGENT, "main")])];
    assert_eq!(names::assign(&input).agents[0].fqdn, ["ws.coder.", "main.ws.me.coder."]);
}

/// CC-60, "an update with duplicate names": the lowest workspace id keeps them, whatever the order.
#[test]
fn duplicates_go_to_the_lowest_id() {
    let other = Ipv6Addr::from(u128::from(AGENT) + 1);
    let mut input = input();
    input.workspaces = vec![workspace(2, "WS", &[(other, "main")]), workspace(1, "ws", &[(AGENT, "main")])];
    for _ in 0..2 {
        let zone = Zone::build(&input);
        for name in ["ws.coder", "main.ws.me.coder", "main.ws.alice.coder"] {
            assert_eq!(zone.addresses(name), [AGENT]);
        }
        let assignment = names::assign(&input);
        assert_eq!(assignment.agents[1].fqdn, [""; 0]);
        assert!(assignment.skipped.iter().all(|s| s.reason == SkipReason::Taken && s.agent == id(other)));
        input.workspaces.reverse();
    }
    // Another agent name below the same workspace name is no clash, but the short name is taken.
    input.workspaces = vec![workspace(1, "ws", &[(AGENT, "main")]), workspace(2, "ws", &[(other, "gpu")])];
    assert_eq!(names::assign(&input).agents[1].fqdn, ["gpu.ws.me.coder.", "gpu.ws.alice.coder."]);
}

#[test]
fn nobody_gets_the_address_of_the_server_or_of_another() {
    let mut twin = *id(AGENT).as_bytes();
    twin[0] = 0xff;
    let mut input = input();
    input.workspaces = vec![
        workspace(1, "evil", &[(DNS_ADDRESS, "main")]),
        workspace(2, "ws", &[(AGENT, "main")]),
        Workspace {
            id: Uuid::from_u128(3),
            name: "twin".to_owned(),
            agents: vec![Agent { id: Uuid::from_bytes(twin), name: "main".to_owned() }],
        },
    ];
    let assignment = names::assign(&input);
    let named: Vec<_> = assignment.agents.iter().map(|agent| !agent.fqdn.is_empty()).collect();
    assert_eq!(named, [false, true, false]);
    assert!(assignment.skipped.iter().all(|skipped| skipped.reason == SkipReason::AddressTaken));
}

/// A workspace may be called like one of our own names or like an ancestor of others.
#[test]
fn workspaces_with_peculiar_names() {
    let mut input = input();
    input.owner = "ws".to_owned();
    let other = |n| Ipv6Addr::from(u128::from(AGENT) + n);
    input.workspaces = vec![
        workspace(1, "me", &[(other(1), "main")]),
        workspace(2, "ns", &[(other(2), "main")]),
        workspace(3, "ws", &[(other(3), "main")]),
    ];
    let zone = Zone::build(&input);
    assert_eq!(zone.addresses("me.coder"), [other(1)]);
    assert_eq!(zone.addresses("ns.coder."), [other(2)]);
    assert_eq!(zone.addresses("WS.coder"), [other(3)]);
    assert_eq!(zone.addresses("main.ws.ws.coder"), [other(3)]);
    assert_eq!(u16::from(ask(&zone, "ws.me.coder", 28).metadata.response_code), 0);
}

#[test]
fn serials_only_grow() {
    let handle = ZoneHandle::new();
    let mut last = 0;
    for time in [100, 100, 90, 200] {
        handle.publish(&input(), time);
        let serial = handle.load().serial();
        assert!(serial > last && u64::from(serial) >= time);
        last = serial;
    }
    handle.withdraw(&Suffix::default(), 0);
    assert!(handle.load().serial() > last && !handle.load().is_ready());
}

/// "Published with the first processed update even if it is empty".
#[test]
fn empty_update_publishes_the_own_name() {
    let mut input = input();
    input.workspaces.clear();
    let zone = Zone::build(&input);
    assert!(zone.is_ready());
    assert_eq!(zone.addresses(&own_name(&input.suffix)), [DNS_ADDRESS]);
}

#[test]
fn suffixes_are_normalised() {
    for (raw, wanted) in [
        ("", "coder"),
        ("coder", "coder"),
        (" .Coder. ", "coder"),
        ("Coder.Corp", "coder.corp"),
        ("bücher.corp", "xn--bcher-kva.corp"),
        ("my_ws.example.com", "my_ws.example.com"),
        ("workspaces", "workspaces"),
    ] {
        assert_eq!(parse(raw).as_deref(), Ok(wanted), "{raw}");
    }
}

/// D-22.
#[test]
fn dangerous_suffixes_are_refused() {
    for raw in
        ["a..b", "a b", "co\nder", "x/y", &"x".repeat(64), &"abcdefgh.".repeat(14), "...", "*", &"ü".repeat(999_999)]
    {
        assert!(matches!(parse(raw), Err(SuffixError::Malformed(_))), "{raw}");
    }
    for raw in ["local", "LOCALHOST", "a.local", "home.arpa", "onion", "x.invalid", "example"] {
        assert!(matches!(parse(raw), Err(SuffixError::Reserved(_))), "{raw}");
    }
    for raw in ["com", ".com.", "Dev", "de", "zz", "app", "co.uk", "com.au", "xn--p1ai", "zip"] {
        assert!(matches!(parse(raw), Err(SuffixError::Public(_))), "{raw}");
    }
    let allow = ["COM.".to_owned(), "local".to_owned()];
    let rules = SuffixRules { allow: &allow, ..SuffixRules::default() };
    assert_eq!(Suffix::parse("com", &rules).unwrap().as_str(), "com");
    assert!(Suffix::parse("net", &rules).is_err());
    assert!(Suffix::parse("local", &rules).is_err(), "only public ones can be allowed");
    let text = parse("com").unwrap_err().to_string();
    assert!(text.contains("\"com\"") && text.contains("dns.allow_suffix"), "{text}");
}

/// D-22, self lock-out: hosts we have to reach and the machine's own domains.
#[test]
fn suffix_must_not_contain_what_the_machine_needs() {
    let hosts = ["coder.corp.example.net".to_owned(), "10.0.0.1".to_owned(), String::new()];
    let search = ["Intra.Acme.io.".to_owned(), ".".to_owned()];
    let rules = SuffixRules { own_hosts: &hosts, search_domains: &search, allow: &[] };
    for raw in ["coder.corp.example.net", "corp.example.net", "example.net"] {
        assert!(matches!(Suffix::parse(raw, &rules), Err(SuffixError::OwnHost { .. })), "{raw}");
    }
    for raw in ["intra.acme.io", "acme.io"] {
        assert!(matches!(Suffix::parse(raw, &rules), Err(SuffixError::SearchDomain { .. })), "{raw}");
    }
    for raw in ["ws.coder.corp.example.net", "oder.corp.example.net", "ws.intra.acme.io", "coder", ""] {
        assert!(Suffix::parse(raw, &rules).is_ok(), "{raw}");
    }
    // Longer than any suffix may be, but still a host we need.
    let deep = [format!("{}acme.io", "abcdefgh.".repeat(20))];
    assert!(Suffix::parse("acme.io", &SuffixRules { own_hosts: &deep, ..SuffixRules::default() }).is_err());
}

#[test]
fn list_of_top_level_domains_is_sorted() {
    assert!(suffix_tlds::TOP_LEVEL_DOMAINS.is_sorted());
}

/// 1.12: at most every 10 s, and a late result changes nothing.
#[test]
fn self_test_runs_when_asked_and_not_too_often() {
    let mut test = SelfTest::default();
    assert!(!test.poll_start(at(0)));
    test.request();
    assert!(test.poll_start(at(0)));
    test.request();
    assert!(!test.poll_start(at(1)), "one at a time");
    assert_eq!(test.handle_result(false, true), Some(DnsState::DegradedOs));
    assert_eq!(test.poll_timeout(at(1)), Some(at(10_000)));
    assert!(!test.poll_start(at(9_999)) && test.poll_start(at(10_000)));
    assert_eq!(test.handle_result(true, true).unwrap().as_str(), "ok");
    test.request();
    assert!(test.poll_start(at(20_000)));
    assert_eq!(test.handle_result(true, true), None, "nothing new");
    assert!({
        test.request();
        test.poll_start(at(30_000))
    });
    test.handle_off();
    assert_eq!((test.handle_result(true, false), test.state()), (None, DnsState::Off));
    assert_eq!(DnsState::DegradedTun.to_string(), "degraded(tun)");
}

#[test]
fn self_test_recognises_the_own_answer() {
    let suffix = Suffix::default();
    let asked = self_test::query(&suffix, 77);
    let answer = super::raw(&Zone::build(&input()), &asked);
    assert!(self_test::is_right(&answer, &asked));
    assert!(!self_test::is_right(&answer, &self_test::query(&suffix, 78)));
    assert!(!self_test::is_right(&super::raw(&Zone::withdrawn(&suffix), &asked), &asked));
    assert!(!self_test::is_right(&[], &asked));
    assert!(self_test::is_ours([DNS_ADDRESS.into()]) && !self_test::is_ours([AGENT.into()]));
}

/// 1,000 agents in one snapshot: every name answers, every pointer points back.
#[test]
fn thousand_agents() {
    let mut input = input();
    let address = |n: u16| Ipv6Addr::new(0xfd60, 0x627a, 0xa42b, 0x4000 | n, 0x8000, n, 0, n);
    input.workspaces = (0..1000).map(|n| workspace(n.into(), &format!("ws{n}"), &[(address(n), "main")])).collect();
    let zone = Zone::build(&input);
    for n in 0..1000 {
        assert_eq!(zone.addresses(&format!("main.ws{n}.me.coder")), [address(n)]);
        assert_eq!(zone.addresses(&format!("ws{n}.coder")), [address(n)]);
        let nibbles: String = u128::from(address(n)).to_be_bytes().iter().map(|b| format!("{b:02x}")).collect();
        let name: String = nibbles.chars().rev().flat_map(|digit| [digit, '.']).collect();
        let pointer = ask(&zone, &format!("{name}ip6.arpa"), 12);
        assert!(pointer.answers[0].data.to_string().contains(&format!("main.ws{n}.alice.coder.")));
    }
}

proptest! {
    /// D-20: through any sequence of updates each snapshot is that of its own input and of nothing before.
    #[test]
    fn every_snapshot_stands_for_itself(updates in prop::collection::vec(prop::collection::vec(0u16..4, 0..5), 1..6)) {
        let handle = ZoneHandle::new();
        let address = |w: usize, a: u16| Ipv6Addr::new(0xfd60, 0x627a, 0xa42b, 0x4000, 0, 0, w as u16, a + 1);
        for agents in updates {
            let mut input = input();
            input.workspaces = agents
                .iter()
                .enumerate()
                .map(|(w, count)| {
                    let names: Vec<_> = (0..*count).map(|a| format!("a{a}")).collect();
                    let agents: Vec<_> =
                        names.iter().zip(0..).map(|(name, a)| (address(w, a), name.as_str())).collect();
                    workspace(w as u128, &format!("w{w}"), &agents)
                })
                .collect();
            handle.publish(&input, 0);
            let zone = handle.load();
            for w in 0..5 {
                let count = agents.get(w).copied().unwrap_or(0);
                assert_eq!(zone.addresses(&format!("w{w}.coder")).len(), usize::from(count == 1));
                for a in 0..4 {
                    let listed = zone.addresses(&format!("a{a}.w{w}.alice.coder")) == [address(w, a)];
                    assert_eq!(listed, a < count);
                }
            }
        }
    }
}
