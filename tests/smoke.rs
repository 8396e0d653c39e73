use serde_json::json;

use super::helpers::on_both;

#[test]
fn the_order_2041() {
    on_both(|service| {
        let claim = json!({"parts": ["ORD-2041", 129.9], "claimant": "a"});
        assert_eq!(service.claim(claim.clone())["claimed"], true);
        assert_eq!(service.claim(claim)["replayed"], true);
        let verdict = service.claim(json!({"parts": ["ORD-2041", 129.9], "claimant": "b"}));
        assert_eq!(verdict["claimed"], false);
        let key = verdict["idempotency_key"].as_str().unwrap();
        let opened = service.pending(json!({"idempotency_key": key, "claimant": "a"}));
        assert_eq!(opened["claimed"], true);
        service
            .done(json!({"idempotency_key": key, "attempt": 1, "external_id": "ch_1"}))
            .ok();
        assert_eq!(service.entry(key)["external_id"], "ch_1");
        assert_eq!(
            service.get("/ledger").ok()["entries"]
                .as_array()
                .unwrap()
                .len(),
            1
        );
        assert_eq!(
            service.get("/ledger?status=done").ok()["entries"][0]["seen_again"],
            1
        );
        assert_eq!(
            service.get("/ledger?status=claimed").ok()["entries"]
                .as_array()
                .unwrap()
                .len(),
            0
        );
    });
}
