"""How several engines hold one tenant to its quotas together.

    pools               what is left of a quota: a bucket that refills, or a count of streams
    share               what one engine claimed of a quota, and when it may claim more
    tenant_shares       the shares of one tenant
    reports             what engines tell each other
    peers               the other engines: what they reported, and what they have heard

Each engine keeps the whole pool of each quota: what it took itself, and what the others reported
to have taken. It claims units before it spends them, and claims again only when every other engine
has heard of its last claim, so the sum of all claims stays within the quota however long reports
take. Nothing here knows requests, sockets or a clock. One engine alone claims what it spends.
"""
