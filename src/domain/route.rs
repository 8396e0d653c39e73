//! Where effects go: a URL a topic, and which hosts no URL may lead to.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use url::{Host, Url};

use super::effect::Topics;
use super::text::Topic;

/// Names under which clouds offer a machine's own credentials.
const METADATA_NAMES: [&str; 7] = [
    "instance-data",
    "instance-data.ec2.internal",
    "metadata",
    "metadata.azure.internal",
    "metadata.goog",
    "metadata.google.internal",
    "metadata.tencentyun.com",
];

/// How many entries there may be: each has a loop that looks for itself.
const MAX_ROUTES: usize = 100;

/// Where effects go.
#[derive(Debug, Default)]
pub struct Routes(Vec<Route>);

/// An entry of `OUTBOX_ROUTES`.
#[derive(Clone)]
pub struct Route {
    /// What it takes.
    pub topics: Topics,
    /// Where that goes; may hold secrets anywhere but in its scheme, host and port.
    pub url: Url,
}

impl Routes {
    /// Reads `OUTBOX_ROUTES`: `TOPIC=URL`, separated by commas; the topic `*` stands for every other.
    /// `allowed_hosts` as [`parse_hosts`] gives them.
    ///
    /// # Errors
    ///
    /// One line, which names the entry by its number and repeats nothing of its URL.
    pub fn parse(text: &str, allowed_hosts: &[String]) -> Result<Self, String> {
        let count = text.split(',').count();
        if count > MAX_ROUTES {
            return Err(format!(
                "OUTBOX_ROUTES: {count} entries are more than {MAX_ROUTES}"
            ));
        }
        let mut entries: Vec<(String, Url)> = Vec::new();
        for (entry, number) in text.split(',').zip(1..) {
            let fault = |fault: &str| format!("OUTBOX_ROUTES: entry {number} {fault}");
            let (topic, url) = entry
                .split_once('=')
                .ok_or_else(|| fault("is not TOPIC=URL; a comma inside a URL is written %2C"))?;
            let (topic, url) = (topic.trim(), url.trim());
            if topic != "*" {
                Topic::try_from(topic.to_owned())
                    .map_err(|rule| fault(&format!("has a topic that is none: it {rule}")))?;
            }
            if entries.iter().any(|(known, _)| known == topic) {
                return Err(fault("has a topic that an entry before it has, too"));
            }
            let url = parse_url(url, allowed_hosts).map_err(|is_wrong| fault(&is_wrong))?;
            entries.push((topic.to_owned(), url));
        }
        let named: Vec<String> = entries
            .iter()
            .map(|(topic, _)| topic.clone())
            .filter(|topic| topic != "*")
            .collect();
        let routes = entries.into_iter().map(|(topic, url)| {
            let topics = if topic == "*" {
                Topics::AllBut(named.clone())
            } else {
                Topics::These(vec![topic])
            };
            Route { topics, url }
        });
        Ok(Self(routes.collect()))
    }

    /// Where `topic` goes, if anywhere.
    pub fn find(&self, topic: &str) -> Option<&Route> {
        self.0.iter().find(|route| route.topics.contains(topic))
    }

    /// What they take together.
    pub fn topics(&self) -> Topics {
        let mut all = Vec::new();
        for route in &self.0 {
            match &route.topics {
                Topics::These(topics) => all.extend(topics.iter().cloned()),
                Topics::AllBut(_) => return Topics::AllBut(Vec::new()),
            }
        }
        Topics::These(all)
    }

    /// All of them, in the order of their entries.
    pub fn iter(&self) -> impl Iterator<Item = &Route> {
        self.0.iter()
    }
}

impl fmt::Debug for Route {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Route")
            .field("topics", &self.topics)
            .field("url", &self.url.origin().ascii_serialization())
            .finish()
    }
}

fn parse_url(text: &str, allowed_hosts: &[String]) -> Result<Url, String> {
    let url = Url::parse(text).map_err(|fault| {
        format!("has a URL that cannot be read ({fault}); a comma inside a URL is written %2C")
    })?;
    if !matches!(url.scheme(), "http" | "https") {
        return Err("has a URL that is neither http nor https".into());
    }
    let host = url.host().ok_or("has a URL without a host")?;
    if url.fragment().is_some() {
        return Err("has a URL with a fragment, which is never sent; # is written %23".into());
    }
    if !is_allowed(&host.to_string(), allowed_hosts) && is_forbidden_host(&host) {
        return Err(
            "leads to a link-local address or a cloud's metadata; where that is meant, name its host in OUTBOX_ALLOWED_HOSTS".into(),
        );
    }
    Ok(url)
}

/// Reads `OUTBOX_ALLOWED_HOSTS`: names and addresses, separated by commas, each as a URL has it
/// afterwards, which is what hosts are compared by.
///
/// # Errors
///
/// One line, which names the entry by its number.
pub fn parse_hosts(text: &str) -> Result<Vec<String>, String> {
    let hosts = text.split(',').zip(1..);
    hosts
        .map(|(entry, number)| {
            let entry = entry.trim();
            let host = match entry.parse::<Ipv6Addr>() {
                Ok(address) => Ok(Host::Ipv6(address)),
                Err(_) => Host::parse(entry),
            };
            host.map(|host| comparable(&host.to_string())).map_err(|_| {
                format!(
                    "OUTBOX_ALLOWED_HOSTS: entry {number} is not a host: a name or an address, without scheme, port and path"
                )
            })
        })
        .collect()
}

/// Whether `host` is among the allowed ones, as [`parse_hosts`] gives them.
pub fn is_allowed(host: &str, allowed_hosts: &[String]) -> bool {
    let host = comparable(host);
    allowed_hosts.contains(&host)
}

/// A host without what makes no difference.
fn comparable(host: &str) -> String {
    host.trim_end_matches('.').to_ascii_lowercase()
}

fn is_forbidden_host(host: &Host<&str>) -> bool {
    match host {
        Host::Domain(name) => METADATA_NAMES.contains(&comparable(name).as_str()),
        Host::Ipv4(address) => is_forbidden((*address).into()),
        Host::Ipv6(address) => is_forbidden((*address).into()),
    }
}

/// Whether an address is link-local (RFC 3927, RFC 4291), or one at which a cloud gives a machine its
/// own credentials. What is sent to it by mistake, or on somebody's behest, says too much to
/// the wrong one; a webhook never has to.
pub fn is_forbidden(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => is_forbidden_v4(address),
        IpAddr::V6(address) => match (address.segments(), embedded_v4(address)) {
            (_, Some(embedded)) => is_forbidden_v4(embedded),
            ([0xfe80..=0xfebf, ..], None) => true,
            // Of Amazon, which has several services there; of Google; of Scaleway.
            ([0xfd00, 0xec2, ..], None) => true,
            ([0xfd20, 0xce, 0, 0, 0, 0, 0, 0x254], None) => true,
            ([0xfd00, 0x42, 0, 0, 0, 0, 0, 0x42], None) => true,
            _ => false,
        },
    }
}

fn is_forbidden_v4(address: Ipv4Addr) -> bool {
    address.is_link_local()
        || matches!(
            address.octets(),
            // Of Alibaba; of Azure; of Oracle.
            [100, 100, 100, 200] | [168, 63, 129, 16] | [192, 0, 0, 192]
        )
}

/// The IPv4 address that an IPv6 address stands for: mapped or compatible (RFC 4291, section 2.5.5),
/// translated (RFC 2765, section 2.1), behind a NAT64 (RFC 6052, section 2.1, and RFC 8215), or reached by 6to4
/// (RFC 3056, section 2).
fn embedded_v4(address: Ipv6Addr) -> Option<Ipv4Addr> {
    match address.segments() {
        [0, 0, 0, 0, 0, 0 | 0xffff, high, low]
        | [0, 0, 0, 0, 0xffff, 0, high, low]
        | [0x64, 0xff9b, 0, 0, 0, 0, high, low]
        | [0x64, 0xff9b, 1, .., high, low]
        | [0x2002, high, low, ..] => {
            let ([a, b], [c, d]) = (high.to_be_bytes(), low.to_be_bytes());
            Some(Ipv4Addr::new(a, b, c, d))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Routes, String> {
        Routes::parse(text, &[])
    }

    #[test]
    fn a_topic_goes_where_its_entry_says_and_any_other_to_the_star() {
        let text = " a = http://a.example/?x=1 ,b=https://b.example:8443/y, * =http://a.example/";
        let routes = parse(text).unwrap();
        let url = |topic: &str| routes.find(topic).unwrap().url.as_str();
        assert_eq!(url("a"), "http://a.example/?x=1");
        assert_eq!(url("b"), "https://b.example:8443/y");
        assert_eq!(url("c"), "http://a.example/");
        let topics: Vec<&Topics> = routes.iter().map(|route| &route.topics).collect();
        let list = |topics: &[&str]| topics.iter().map(ToString::to_string).collect();
        assert_eq!(
            topics,
            [
                &Topics::These(list(&["a"])),
                &Topics::These(list(&["b"])),
                &Topics::AllBut(list(&["a", "b"]))
            ]
        );
    }

    #[test]
    fn without_a_star_other_topics_go_nowhere() {
        let routes = parse("a=http://a.example/").unwrap();
        assert!(routes.find("b").is_none());
        assert!(routes.find("*").is_none());
        assert!(Routes::default().find("a").is_none());
    }

    #[test]
    fn the_star_may_stand_first() {
        let routes = parse("*=http://all.example/,a=http://a.example/").unwrap();
        let url = |topic: &str| routes.find(topic).unwrap().url.as_str();
        assert_eq!(url("a"), "http://a.example/");
        assert_eq!(url("b"), "http://all.example/");
    }

    #[test]
    fn a_refusal_is_one_line_that_names_the_entry_and_not_the_url() {
        let too_long = format!("{}=http://h/hunter2", "a".repeat(129));
        for bad in [
            "",
            "hunter2",
            "=http://h/hunter2",
            "a b=http://h/hunter2",
            "**=http://h/hunter2",
            &too_long,
            "ok=http://h/hunter2",
            "b=",
            "b=hunter2",
            "b=/hunter2",
            "b=//h/hunter2",
            "b=ftp://h/hunter2",
            "b=file:///hunter2",
            "b=mailto:hunter2@h",
            "b=http://",
            "b=http:///",
            "b=http://h:hunter2/",
            "b=http://u:hunter2@/",
            "b=http://hunter2:99999/",
            "b=http://hun ter2/",
            "b=http://h/hunter2#x",
            "b=http://h/#",
            "b=http://169.254.169.254/hunter2",
        ] {
            let refused = parse(&format!("ok=http://h/,{bad}")).unwrap_err();
            assert!(refused.starts_with("OUTBOX_ROUTES: entry 2 "), "{refused}");
            assert!(!refused.contains("hunter2"), "{refused}");
            assert!(!refused.contains('\n'), "{refused}");
        }
    }

    #[test]
    fn there_are_a_hundred_at_most() {
        let of = |count: usize| {
            let entries = (0..count).map(|number| format!("t{number}=http://a.example/"));
            parse(&entries.collect::<Vec<_>>().join(","))
        };
        assert_eq!(of(100).unwrap().iter().count(), 100);
        let refused = of(101).unwrap_err();
        assert_eq!(refused, "OUTBOX_ROUTES: 101 entries are more than 100");
    }

    #[test]
    fn a_comma_inside_a_url_is_explained() {
        for bad in ["a=http://h/?x=1,2", "a=http://h/?x=1,y=2"] {
            assert!(parse(bad).unwrap_err().contains("%2C"));
        }
        let routes = parse("a=http://h/?x=1%2C2").unwrap();
        assert_eq!(routes.find("a").unwrap().url.query(), Some("x=1%2C2"));
    }

    #[test]
    fn only_scheme_host_and_port_show_in_debug() {
        let routes = parse("a=https://hunter2:hunter2@h.example:8443/hunter2?hunter2").unwrap();
        let shown = format!("{routes:?}");
        assert!(!shown.contains("hunter2"), "{shown}");
        assert!(shown.contains("\"https://h.example:8443\""), "{shown}");
    }

    #[test]
    fn forbidden_hosts_are_refused_however_they_are_written() {
        for host in [
            "169.254.169.254",
            "169.254.0.1",
            "2852039166",
            "0xA9FEA9FE",
            "0251.0376.0251.0376",
            "169.254.43518",
            "169.254.169.254.",
            "１６９.254.169.254",
            "[fe80::1]",
            "[febf::1]",
            "[::ffff:169.254.169.254]",
            "[::ffff:a9fe:a9fe]",
            "[::169.254.169.254]",
            "[64:ff9b::a9fe:a9fe]",
            "[64:ff9b:1::a9fe:a9fe]",
            "[::ffff:0:a9fe:a9fe]",
            "[2002:a9fe:a9fe::1]",
            "[fd00:ec2::254]",
            "[FD00:0EC2:0:0::254]",
            "[fd20:ce::254]",
            "100.100.100.200",
            "[::ffff:100.100.100.200]",
            "168.63.129.16",
            "metadata",
            "Metadata.Google.Internal",
            "metadata.google.internal.",
            "metadata.goog",
            "metadata%2Egoog",
            "instance-data",
        ] {
            let refused = parse(&format!("a=http://{host}/")).unwrap_err();
            assert!(
                refused.contains("OUTBOX_ALLOWED_HOSTS"),
                "{host}: {refused}"
            );
        }
    }

    #[test]
    fn other_hosts_are_taken() {
        for host in [
            "localhost",
            "127.0.0.1",
            "10.0.0.1",
            "192.168.1.1",
            "169.253.255.255",
            "169.255.0.1",
            "100.100.100.201",
            "[::1]",
            "[::]",
            "[fd00::1]",
            "[fec0::1]",
            "[fe7f::1]",
            "[::ffff:10.0.0.1]",
            "metadata.example",
            "n8n",
        ] {
            assert!(parse(&format!("a=http://{host}/")).is_ok(), "{host}");
        }
    }

    #[test]
    fn a_forbidden_host_may_be_allowed_however_it_is_written() {
        for (allowed, host) in [
            ("169.254.169.254", "0xA9FEA9FE"),
            ("0xA9FEA9FE", "169.254.169.254"),
            ("x, fe80::1 ,y", "[fe80:0::1]"),
            ("[fe80::1]", "[fe80::1]"),
            ("METADATA.goog.", "metadata.goog"),
            ("metadata.goog", "Metadata.Goog."),
        ] {
            let hosts = parse_hosts(allowed).unwrap();
            let routes = Routes::parse(&format!("a=http://{host}/"), &hosts);
            assert!(routes.is_ok(), "{allowed}: {host}");
            let other = Routes::parse("a=http://169.254.1.1/", &hosts);
            assert!(other.is_err(), "{allowed}");
        }
    }

    #[test]
    fn an_allowed_host_is_a_host_alone() {
        for bad in ["", "h,", "http://h", "h:80", "h/x", "a b", "u@h", "[h]"] {
            let refused = parse_hosts(bad).unwrap_err();
            assert!(
                refused.starts_with("OUTBOX_ALLOWED_HOSTS: entry "),
                "{bad}: {refused}"
            );
        }
    }
}
